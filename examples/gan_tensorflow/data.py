"""Grey images of 28x28 pixels, MNIST's or synthetic, and the noise for each batch."""

import gzip
from pathlib import Path

import numpy as np
import tensorflow as tf

NOISE = 32  # numbers from which a picture is made


def load_set(directory: str | None, batch_size: int, num_rows: int | None = None) -> tf.data.Dataset:
    """Batches of (pictures, noise), in an order that changes from epoch to epoch.

    The noise is part of the batch, and not drawn in the step: so each picture has its own, however a batch is split.
    """
    pixels = make_up(250) if directory is None else read_pictures(Path(directory))
    images = (pixels[:num_rows, :, :, np.newaxis].astype("float32") - 127.5) / 127.5
    batches = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images), seed=0).batch(batch_size)
    seeds = tf.data.Dataset.random(seed=0, rerandomize_each_iteration=True).batch(2)
    return tf.data.Dataset.zip(batches, seeds).map(add_noise)


def add_noise(images: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return images, tf.random.stateless_normal([tf.shape(images)[0], NOISE], seed)


def read_pictures(path: Path) -> np.ndarray:
    """MNIST's idx file of pictures, packed with gzip or not: 16 bytes of sizes, then the pixels."""
    found = sorted(path.glob("train-images*"))
    if not found:
        raise SystemExit(f"{path} has no train-images-idx3-ubyte (or .gz), which is one of MNIST's four files.")
    data = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
    if data[:4] != bytes([0, 0, 8, 3]) or (len(data) - 16) % 784:
        raise SystemExit(f"{found[0]} is not an idx file of pictures of 28x28 bytes, or is cut short.")
    return np.frombuffer(data, np.uint8, offset=16).reshape(-1, 28, 28)


def make_up(num_rows: int) -> np.ndarray:
    """A bright disc on a dark ground, somewhere near the middle."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:28, :28]
    centers = rng.uniform(10, 18, (num_rows, 2, 1, 1))
    distance = np.hypot(rows - centers[:, 0], columns - centers[:, 1])
    return (255 * (distance < rng.uniform(4, 8, (num_rows, 1, 1)))).astype(np.uint8)
