"""Newswires as sequences of word numbers, with their topics: Keras's Reuters file, or synthetic."""

from pathlib import Path

import keras
import numpy as np

LENGTH = 300  # the last words of a newswire; shorter ones are filled up with zeros in front
START, FIRST_WORD = 1, 3  # as keras.datasets.reuters has them

Rows = tuple[np.ndarray, np.ndarray]


def load_sets(directory: str | None) -> tuple[Rows, Rows]:
    """Return training and test samples, split 80:20 as Keras does. Without a directory, they are synthetic."""
    if directory is None:
        return make_up(num_rows=512, seed=1), make_up(num_rows=128, seed=2)
    newswires, topics = read(Path(directory))
    order = np.arange(len(newswires))
    np.random.RandomState(113).shuffle(order)
    rows = np.zeros((len(order), LENGTH), "int32")
    for row, number in zip(rows, order, strict=True):
        words = [START, *(newswires[number] + FIRST_WORD)][-LENGTH:]
        row[-len(words) :] = words
    topics = topics[order].astype("int32")
    num_train = int(len(rows) * 0.8)
    return (rows[:num_train], topics[:num_train]), (rows[num_train:], topics[num_train:])


def read(directory: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """From `reuters_flat.npz` (tokens, offsets, y), or `reuters.npz`, which Keras keeps in ~/.keras/datasets."""
    if (flat := directory / "reuters_flat.npz").exists():
        with np.load(flat) as file:
            return np.split(file["tokens"].astype("int32"), file["offsets"][1:-1]), file["y"]
    if (packed := directory / "reuters.npz").exists():
        # Its rows are Python lists in a pickle; Keras reads them with a short list of what may be in there.
        from keras.src.utils import npz_utils

        file = npz_utils.load_npz(str(packed))
        return [np.array(words, "int32") for words in file["x"]], file["y"]
    raise SystemExit(f"{directory} has neither reuters.npz nor reuters_flat.npz.")


def make_up(num_rows: int, seed: int) -> Rows:
    """46 topics with a few words of their own each, between words that all of them use."""
    rng = np.random.default_rng(seed)
    topics = rng.integers(0, 46, num_rows).astype("int32")
    rows = (rng.random((num_rows, LENGTH)) ** 3 * 5000).astype("int32") + 500
    own = rng.random((num_rows, LENGTH)) < 0.2
    rows[own] = (4 + 10 * topics[:, None] + rng.integers(0, 10, (num_rows, LENGTH)))[own]
    lengths = rng.integers(20, LENGTH, num_rows)
    rows[np.arange(LENGTH) < LENGTH - lengths[:, None]] = 0
    return rows, topics


def make_dataset(rows: Rows, batch_size: int, *, shuffle: bool):
    """What people write on TensorFlow; elsewhere the same by Keras's own means."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices(rows).cache()
        dataset = dataset.shuffle(len(rows[0])) if shuffle else dataset
        return dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)
    return Batches(*rows, batch_size, shuffle)


class Batches(keras.utils.PyDataset):
    def __init__(self, x: np.ndarray, y: np.ndarray, batch_size: int, shuffle: bool) -> None:
        super().__init__()
        self.x, self.y, self.batch_size, self.shuffle = x, y, batch_size, shuffle
        self.order = np.arange(len(x))
        self.on_epoch_end()

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch_size)

    def __getitem__(self, index: int) -> Rows:
        chosen = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        return self.x[chosen], self.y[chosen]

    def on_epoch_end(self) -> None:
        if self.shuffle:
            np.random.shuffle(self.order)
