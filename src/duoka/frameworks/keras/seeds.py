"""The seed of Keras, whichever backend it runs on."""

from __future__ import annotations

import sys
from typing import Any

import keras
from keras.src.utils import rng_utils


class _NotImported:
    """Stands for TensorFlow where nobody has imported it: Keras would, wherever it is installed, to seed it."""

    available = False


def seed(number: int) -> None:
    """TensorFlow has a seed of its own when it is imported later."""
    former: Any = rng_utils.tf
    if "tensorflow" not in sys.modules:
        rng_utils.tf = _NotImported
    try:
        keras.utils.set_random_seed(number % 2**32)
    finally:
        rng_utils.tf = former
