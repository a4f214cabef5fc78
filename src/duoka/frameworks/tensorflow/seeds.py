"""The seed of TensorFlow's operations."""

from __future__ import annotations

import tensorflow as tf


def seed(number: int) -> None:
    tf.random.set_seed(number)
