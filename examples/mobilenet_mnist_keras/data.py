"""Images in classes: read from folders with Pillow, on every Keras backend, or synthetic."""

from pathlib import Path

import keras
import numpy as np

SIZE = 32  # pixels; MobileNetV2 halves them five times
PICTURES = {".png", ".jpg", ".jpeg"}


def load_sets(directory: str | None, batch_size: int) -> tuple[keras.utils.PyDataset, keras.utils.PyDataset, int]:
    """Return the training set, the test set and the number of classes.

    The directory has folders `train` and `test` with one folder of PNG or JPEG files for each class (MNIST: 0 to 9).
    Without a directory, the images are synthetic.
    """
    if directory is None:
        train, test = MadeUp(192, seed=1), MadeUp(64, seed=2)
        return Batches(train, batch_size, shuffle=True), Batches(test, batch_size, shuffle=False), 10
    path = Path(directory)
    if not (path / "train").is_dir() or not (path / "test").is_dir():
        raise SystemExit(f"{directory} has no folders train and test; make_folder.py writes them from MNIST's files.")
    classes = sorted(entry.name for entry in (path / "train").iterdir() if entry.is_dir())
    train, test = (PictureFolder(path / part, classes) for part in ("train", "test"))
    return Batches(train, batch_size, shuffle=True), Batches(test, batch_size, shuffle=False), len(classes)


class Batches(keras.utils.PyDataset):
    """Batches of a set. To train with, in an order that changes from epoch to epoch, and without a rest: BatchNorm
    would take the statistics of a few pictures for those of all."""

    def __init__(self, pictures, batch_size: int, *, shuffle: bool) -> None:
        super().__init__()
        self.pictures, self.batch_size, self.shuffle = pictures, batch_size, shuffle
        self.order = np.arange(len(pictures.labels))
        self.on_epoch_end()

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.batch_size)
        return full + (rest > 0 and not (self.shuffle and full))

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        pixels = np.stack([self.pictures.read(number) for number in chosen])
        return pixels.astype("float32") / 127.5 - 1, self.pictures.labels[chosen]

    def on_epoch_end(self) -> None:
        if self.shuffle:
            np.random.shuffle(self.order)


class PictureFolder:
    """Pictures in one folder per class, read when they are asked for."""

    def __init__(self, path: Path, classes: list[str]) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise SystemExit("Reading pictures needs Pillow: pip install pillow") from None
        self.open_picture = Image.open
        found = [
            (file, label)
            for label, name in enumerate(classes)
            for file in sorted((path / name).rglob("*"))
            if file.suffix.lower() in PICTURES
        ]
        if not found:
            raise SystemExit(f"{path} has no .png or .jpg files in folders of classes.")
        self.files = [file for file, _ in found]
        self.labels = np.array([label for _, label in found], "int32")

    def read(self, number: int) -> np.ndarray:
        with self.open_picture(self.files[number]) as picture:
            return np.asarray(picture.convert("RGB").resize((SIZE, SIZE)))


class MadeUp:
    """Ten fixed patterns of 4x4 patches, each picture one of them under noise."""

    def __init__(self, num_rows: int, seed: int) -> None:
        patterns = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3)).repeat(4, axis=1).repeat(4, axis=2)
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 10, num_rows).astype("int32")
        self.pixels = np.clip(patterns[self.labels] + rng.normal(0, 60, (num_rows, SIZE, SIZE, 3)), 0, 255)

    def read(self, number: int) -> np.ndarray:
        return self.pixels[number]
