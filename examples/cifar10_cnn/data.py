"""CIFAR-10 from its binary version, or synthetic images."""

import gzip
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue plane


def load_sets(directory: str | None) -> tuple[Dataset, Dataset]:
    """Return the training set and the test set.

    The directory holds CIFAR-10's binary version: `data_batch_1.bin` and so on, as many as there are, and
    `test_batch.bin`, gzipped or not. Without a directory, the images are synthetic and few.
    """
    if directory is None:
        return Pictures(*make_up(num_rows=768, seed=1), flips=True), Pictures(*make_up(num_rows=128, seed=2))
    train, test = read(Path(directory), "data_batch"), read(Path(directory), "test_batch")
    return Pictures(*train, flips=True), Pictures(*test)


class Pictures(Dataset):
    def __init__(self, images: np.ndarray, labels: np.ndarray, flips: bool = False) -> None:
        """With `flips`, every other picture is mirrored, drawn anew each time."""
        self.images, self.labels, self.flips = torch.tensor(images), torch.tensor(labels, dtype=torch.int64), flips

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index].float() / 128 - 1
        if self.flips and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, self.labels[index]


def read(path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    files = sorted([*path.glob(f"{name}*.bin"), *path.glob(f"{name}*.bin.gz")])
    if not files and any(path.glob(f"{name}*")):
        raise SystemExit(
            f"{path} seems to hold CIFAR-10's python version, which is made of pickles: loading one can run any code.\n"
            "Use the binary version (cifar-10-binary.tar.gz)."
        )
    if not files:
        raise SystemExit(f"{path} has no {name}*.bin or {name}*.bin.gz; these are CIFAR-10's binary version.")
    records = np.concatenate([read_records(file) for file in files])
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def read_records(file: Path) -> np.ndarray:
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    if not data or len(data) % RECORD:
        raise SystemExit(f"{file} has {len(data)} bytes, which is no whole number of records of {RECORD}.")
    return np.frombuffer(data, np.uint8).reshape(-1, RECORD)


def make_up(num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten fixed patterns of 8x8 patches, the same in a mirror, each row one of them under noise."""
    half = np.random.default_rng(0).integers(64, 192, size=(10, 3, 4, 2))
    patterns = np.concatenate([half, half[..., ::-1]], axis=3).repeat(8, axis=2).repeat(8, axis=3)
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, num_rows)
    noise = rng.integers(-64, 64, size=(num_rows, 3, 32, 32))
    return (patterns[labels] + noise).astype(np.uint8), labels
