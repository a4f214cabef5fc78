"""Images of cats and dogs, from a folder or synthetic, as `tf.data` datasets: `fit` takes them on every backend."""

from pathlib import Path

import keras
import numpy as np


def load_sets(directory: str | None, batch_size: int, size: int):
    """Return the training set and the validation set. The directory has one folder per class: `cat` and `dog`."""
    if directory is None:
        return make_up(num_rows=64, batch_size=batch_size, size=size, seed=1), make_up(32, batch_size, size, seed=2)
    if not any(entry.is_dir() for entry in Path(directory).iterdir()):
        raise SystemExit(f"{directory} has no folders of images; make_folder.py writes two from CIFAR-10's files.")
    return keras.utils.image_dataset_from_directory(
        directory,
        image_size=(size, size),
        batch_size=batch_size,
        validation_split=0.2,
        subset="both",
        seed=0,
        verbose=False,
    )


def make_up(num_rows: int, batch_size: int, size: int, seed: int):
    """Make noise that is brighter in the upper half for one class and in the lower half for the other."""
    import tensorflow as tf

    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, num_rows).astype("int32")
    noise = rng.integers(0, 128, (num_rows, size, size, 3), np.uint8)
    for image, label in zip(noise, labels, strict=True):
        half = image[size // 2 :] if label else image[: size // 2]
        half += 100
    return tf.data.Dataset.from_tensor_slices((noise, labels)).shuffle(num_rows).batch(batch_size)
