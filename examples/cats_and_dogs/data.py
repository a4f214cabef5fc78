"""Photos of cats and of dogs from a folder, or made up, as datasets of tf.data, which `fit` takes on every backend."""

from pathlib import Path

import keras
import numpy as np


def load_sets(directory: str | None, batch_size: int, size: int):
    """Training set and validation set. The directory has a folder `cat` and a folder `dog` (or any two others)."""
    if directory is None:
        return make_up(num_rows=128, batch_size=batch_size, size=size, seed=1), make_up(32, batch_size, size, seed=2)
    if not any(entry.is_dir() for entry in Path(directory).iterdir()):
        raise SystemExit(f"{directory} has no folders of pictures; make_folder.py writes two from CIFAR-10's files.")
    return keras.utils.image_dataset_from_directory(
        directory, image_size=(size, size), batch_size=batch_size, validation_split=0.2, subset="both", seed=0
    )


def make_up(num_rows: int, batch_size: int, size: int, seed: int):
    """Noise, brighter above for the one class and below for the other."""
    import tensorflow as tf

    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, num_rows).astype("int32")
    noise = rng.integers(0, 128, (num_rows, size, size, 3), np.uint8)
    for image, label in zip(noise, labels, strict=True):
        half = image[size // 2 :] if label else image[: size // 2]
        half += 100
    return tf.data.Dataset.from_tensor_slices((noise, labels)).shuffle(num_rows).batch(batch_size)
