"""Grey images of 28x28 pixels in classes: MNIST's files, folders of images, or synthetic."""

import gzip
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

PICTURES = {".png", ".jpg", ".jpeg"}


def load_sets(directory: str | None) -> tuple[Dataset, Dataset, int]:
    """Return the training set, the test set and the number of classes.

    The directory holds either MNIST's four idx files (`train-images-idx3-ubyte` and so on, gzipped or not), or
    folders `train` and `test` with one folder of PNG or JPEG files per class. Without a directory, the images are
    synthetic and few.
    """
    if directory is None:
        return make_up(num_rows=256, seed=1), make_up(num_rows=64, seed=2), 10
    path = Path(directory)
    if any(path.glob("train-images*")):
        return read_idx_pair(path, "train"), read_idx_pair(path, "t10k"), 10
    if (path / "train").is_dir() and (path / "test").is_dir():
        classes = sorted(entry.name for entry in (path / "train").iterdir() if entry.is_dir())
        return PictureFolder(path / "train", classes), PictureFolder(path / "test", classes), len(classes)
    raise SystemExit(
        f"{directory} holds neither train-images-idx3-ubyte (or .gz) nor folders train and test.\n"
        "Give MNIST's four files, or train/<class>/*.png and test/<class>/*.png."
    )


def make_up(num_rows: int, seed: int) -> TensorDataset:
    """Ten fixed patterns of 4x4 patches, each row one of them under noise."""
    patterns = np.random.default_rng(0).normal(size=(10, 1, 7, 7)).repeat(4, axis=2).repeat(4, axis=3)
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, num_rows)
    images = patterns[labels] + rng.normal(size=(num_rows, 1, 28, 28))
    return TensorDataset(torch.tensor(images, dtype=torch.float32), torch.tensor(labels))


def read_idx_pair(path: Path, part: str) -> TensorDataset:
    images = read_idx(path, f"{part}-images*", dimensions=3)
    labels = read_idx(path, f"{part}-labels*", dimensions=1)
    if len(images) != len(labels):
        raise SystemExit(f"{path} has {len(images)} images and {len(labels)} labels in its {part} files.")
    return TensorDataset(to_input(torch.tensor(images)), torch.tensor(labels, dtype=torch.int64))


def read_idx(path: Path, pattern: str, dimensions: int) -> np.ndarray:
    """An idx file of bytes: two zeros, the type (8), the number of dimensions, their sizes, the values."""
    found = sorted(path.glob(pattern))
    if not found:
        raise SystemExit(f"{path} has no {pattern} file; MNIST has four: images and labels, for train and for t10k.")
    data = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
    header = 4 + 4 * dimensions
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) < header:
        raise SystemExit(f"{found[0]} is not an idx file of bytes in {dimensions} dimensions.")
    sizes = np.frombuffer(data, ">i4", count=dimensions, offset=4)
    if len(data) - header != sizes.prod(dtype=np.int64):
        raise SystemExit(f"{found[0]} should hold {sizes.prod(dtype=np.int64)} values and holds {len(data) - header}.")
    return np.frombuffer(data, np.uint8, offset=header).reshape(sizes)


class PictureFolder(Dataset):
    """Pictures in one folder per class, read when they are asked for; made grey and 28x28."""

    def __init__(self, path: Path, classes: list[str]) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise SystemExit("Reading pictures needs Pillow: pip install pillow") from None
        self.open_picture = Image.open
        self.files = [
            (file, label)
            for label, name in enumerate(classes)
            for file in sorted((path / name).rglob("*"))
            if file.suffix.lower() in PICTURES
        ]
        if not self.files:
            raise SystemExit(f"{path} has no .png or .jpg files in folders of classes.")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.files[index]
        with self.open_picture(file) as picture:
            pixels = np.array(picture.convert("L").resize((28, 28)))
        return to_input(torch.tensor(pixels)), label


def to_input(pixels: torch.Tensor) -> torch.Tensor:
    """Bytes as numbers around zero, with a dimension for the channel."""
    return (pixels.float() / 255 - 0.5).unsqueeze(-3)
