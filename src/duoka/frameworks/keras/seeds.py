"""The seed of Keras, whichever backend it runs on."""

from __future__ import annotations

import keras


def seed(number: int) -> None:
    keras.utils.set_random_seed(number % 2**32)
