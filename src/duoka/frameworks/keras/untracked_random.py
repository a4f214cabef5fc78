"""Random numbers of TensorFlow itself in a step of Keras: they come from a counter of the process, not of a replica."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from duoka.frameworks.tensorflow.graphs import is_stateful_random, walk


def draws_outside() -> bool:
    """While a step is traced, after its last operation. A step that runs eagerly is not looked at."""
    graph = tf.compat.v1.get_default_graph()
    return hasattr(graph, "captures") and any(is_stateful_random(operation) for operation, _ in walk(graph))


def say_random(model: Any) -> str:
    return (
        f"the step of {type(model).__name__} draws from tf.random: its numbers follow neither step nor replica, and are"
        " outside of the promise of equal bits; keras.random with a keras.random.SeedGenerator is inside"
    )
