"""Images in classes as a `tf.data` dataset with one-hot labels: from a folder, or synthetic."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

SIZE = 32  # pixels; MobileNetV2 halves them five times


def load_set(directory: str | None, batch_size: int) -> tuple[tf.data.Dataset, int]:
    """Return the training set, without a partial last batch, and the number of classes.

    The directory has a folder `train` with one folder of images per class (MNIST: 0 to 9). Without a directory, the
    images are synthetic.
    """
    rows, num_classes = make_up(192) if directory is None else read_folder(Path(directory) / "train")
    # BatchNorm would take the statistics of a few pictures for those of all.
    batches = rows.batch(batch_size, drop_remainder=True)
    return batches.map(lambda pixels, labels: (pixels / 127.5 - 1, labels)).prefetch(2), num_classes


def read_folder(path: Path) -> tuple[tf.data.Dataset, int]:
    if not path.is_dir():
        raise SystemExit(f"{path} is not a folder; examples/mobilenet_mnist_keras/make_folder.py writes one.")
    pictures = keras.utils.image_dataset_from_directory(
        path, label_mode="categorical", image_size=(SIZE, SIZE), batch_size=None, seed=0, verbose=False
    )
    return pictures, len(pictures.class_names)


def make_up(num_rows: int) -> tuple[tf.data.Dataset, int]:
    """Ten fixed patterns of 4x4 patches, each picture one of them under noise."""
    patterns = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3)).repeat(4, axis=1).repeat(4, axis=2)
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 10, num_rows)
    pixels = np.clip(patterns[labels] + rng.normal(0, 60, (num_rows, SIZE, SIZE, 3)), 0, 255).astype("float32")
    rows = tf.data.Dataset.from_tensor_slices((pixels, np.eye(10, dtype="float32")[labels]))
    return rows.shuffle(num_rows, seed=0), 10
