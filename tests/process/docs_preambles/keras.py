"""Names that Keras blocks may use without defining them."""

import keras
import numpy as np
from keras import layers
from keras.callbacks import EarlyStopping  # noqa: F401

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
x_test, y_test = x_val, y_val = x[:32], y[:32]


def create_model():
    return keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(2, activation="softmax")])
