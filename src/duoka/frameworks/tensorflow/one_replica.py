"""`run` with one replica: the user's function as it is. Where there are checkpoints, its steps are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from duoka.frameworks.tensorflow.losses import Losses
from duoka.frameworks.tensorflow.recording import Update, watching_updates
from duoka.frameworks.tensorflow.replica import ReplicaContext, entered


class OneReplica:
    def __init__(self, strategy: Any, is_counted: Callable[[], bool], count: Callable[[], None]) -> None:
        self._strategy, self._is_counted, self._count = strategy, is_counted, count
        self._training: set[Any] = set()  # functions that call optimizers: once traced, this is not seen any more

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        is_seen = False

        def see(update: Update, apply: Callable[[Sequence[Any]], Any]) -> Any:
            nonlocal is_seen
            is_seen = True
            return apply(update.gradients)

        context = ReplicaContext(self._strategy, tf.constant(0), Losses(1.0, 1), None)
        with entered(context), watching_updates(see) if self._is_counted() else nullcontext():
            result = function(*args, **kwargs)
        if is_seen:
            self._training.add(function)
        if function in self._training:
            self._count_here()
        return result

    def _count_here(self) -> None:
        if tf.executing_eagerly():
            self._count()
        else:
            tf.numpy_function(self._count_in_graph, [], tf.int64)  # each time that the graph runs

    def _count_in_graph(self) -> Any:
        self._count()
        return np.int64(0)
