"""In graphs, what workers do together happens in the order of the text: in functions, branches and loops, too.

TensorFlow itself keeps an order only between operations that use the same variables. Two functions that train two
models would run side by side, and their replicas would be taken for those of one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from duoka.frameworks.keras.host_tensorflow import TensorFlowHost
from duoka.frameworks.tensorflow.graphs import is_read


class Order:
    def __init__(self, host: TensorFlowHost) -> None:
        self._host = host
        self._turns: Any = None  # a variable that every turn writes to

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around calls to the host: they come after all turns before, and after what these have done to variables."""
        if tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        self._host.follow(self._write([]))
        start = len(graph.get_operations())
        yield
        self._host.follow(self._write([each for each in graph.get_operations()[start:] if _has_effects(each)]))

    def _write(self, after: Sequence[Any]) -> Any:
        if self._turns is None:
            with tf.init_scope(), tf.device("/device:CPU:0"):
                self._turns = tf.Variable(0, trainable=False, dtype=tf.int64, name="turns")
        with tf.control_dependencies(after):
            return self._turns.assign_add(1, read_value=False)


def _has_effects(operation: Any) -> bool:
    return operation._is_stateful and not is_read(operation)
