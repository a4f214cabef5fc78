"""`run` with one replica: the function as it is. Its updates are counted; the placement of the first is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from duoka.frameworks.tensorflow.losses import Losses
from duoka.frameworks.tensorflow.middle import Reasons
from duoka.frameworks.tensorflow.recording import Update, watching_updates
from duoka.frameworks.tensorflow.replica import ReplicaContext, entered
from duoka.frameworks.tensorflow.step import trained_by


class OneReplica:
    def __init__(
        self,
        strategy: Any,
        is_followed: Callable[[], bool],
        count: Callable[[], None],
        log_placement: Callable[[Callable[[], list[Any]]], ExitStack],
    ) -> None:
        """With `is_followed`, `count` is called for each step that trains, in graphs too."""
        self._strategy, self._is_followed, self._count = strategy, is_followed, count
        self._log_placement = log_placement
        self._training = Reasons()  # functions that call optimizers in a graph: once traced, this is not seen any more
        self._in_graphs: Any = None  # steps that graphs have counted by themselves
        self._variables: dict[int, Any] = {}  # that are trained

    @property
    def steps_in_graphs(self) -> int:
        with tf.init_scope():
            return 0 if self._in_graphs is None else int(self._in_graphs.numpy())

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        is_seen = False

        def see(update: Update, apply: Callable[[Sequence[Any]], Any]) -> Any:
            nonlocal is_seen
            is_seen = True
            if not tf.executing_eagerly():
                self._training.keep(function, "it was traced")
            result = apply(update.gradients)
            self._variables |= {id(variable): variable for variable in trained_by([update])}
            return result

        is_known = self._training.of(function) is not None
        with self._log_placement(lambda: list(self._variables.values())) as around:
            around.enter_context(entered(ReplicaContext(self._strategy, tf.constant(0), Losses(1.0, 1), None)))
            if not is_known:
                around.enter_context(watching_updates(see))
            result = function(*args, **kwargs)
        if is_seen or is_known:
            self._count_here()
        return result

    def _count_here(self) -> None:
        if tf.executing_eagerly():
            self._count()
        elif self._is_followed():
            tf.numpy_function(self._count_in_graph, [], tf.int64)  # each time that the graph runs
        elif tf.compat.v1.executing_eagerly_outside_functions():
            self._counter.assign_add(1)  # what XLA can compile, too

    def _count_in_graph(self) -> Any:
        self._count()
        return np.int64(0)

    @property
    def _counter(self) -> Any:
        if self._in_graphs is None:
            with tf.init_scope():
                self._in_graphs = tf.Variable(0, dtype=tf.int64, trainable=False, name="duoka_steps")
        return self._in_graphs
