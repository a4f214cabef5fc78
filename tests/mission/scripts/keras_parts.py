"""A small classifier and its data for the Keras snippets of articles 0 and 3."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

NUM_CLASSES = 4


class Counting(layers.Layer):
    """Notes how many samples a call sees."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: set[int] = set()

    def call(self, x):
        if isinstance(x.shape[0], int):
            self.counts.add(x.shape[0])
        return x


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    outputs = layers.Dense(NUM_CLASSES, activation="softmax")
    return keras.Sequential([keras.Input((6,)), Counting(), layers.Dense(16, activation="relu"), outputs])


def make_data(num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(num_samples)
    x = rng.standard_normal((num_samples, 6)).astype("float32")
    return x, keras.utils.to_categorical(x[:, :NUM_CLASSES].argmax(1), NUM_CLASSES)
