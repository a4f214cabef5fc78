"""Updates in a graph that XLA makes one operation of: the many small ones of an optimizer take longer than their work.

A step of a small CNN with Nadam takes 15 instead of 19 ms.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from duoka.frameworks.keras.tensorflow_backend import FEW_VARIABLES
from duoka.frameworks.tensorflow.graphs import is_random, walk
from duoka.frameworks.tensorflow.recording import Update

_LOST_IN_XLA = ("Assert", "CheckNumerics", "CheckNumericsV2")  # it leaves them out


def apply_compiled(update: Update, gradients: Sequence[Any]) -> None:
    """With the gradients of all replicas, compiled where that can be done and changes nothing but the last bits."""
    is_wanted = isinstance(update.optimizer, BaseOptimizer) and 0 < len(update.variables) <= FEW_VARIABLES
    compiled = tf.function(update.apply, autograph=False, jit_compile=True)
    if is_wanted and _can_be_compiled(compiled, update, gradients):
        compiled(list(gradients))
    else:
        update.apply(gradients)


def _can_be_compiled(compiled: Any, update: Update, gradients: Sequence[Any]) -> bool:
    """Found out here: when the graph runs, there is no way back."""
    with tf.init_scope():
        like = [None if gradient is None else _zeros_like(gradient) for gradient in gradients]
        try:
            graph = compiled.get_concrete_function(like).graph
            devices = {variable.device for variable in graph.variables}
            if len(devices) != 1 or any(_is_changed_by_xla(operation) for operation, _ in walk(graph)):
                return False
            # Without a device TensorFlow draws a random number to find one, out of the script's own sequence.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled.experimental_get_compiler_ir(like)(stage="hlo", device_name=devices.pop())
        except (tf.errors.OpError, ValueError, TypeError, NotImplementedError):
            return False
    return True


def _is_changed_by_xla(operation: Any) -> bool:
    """XLA makes other numbers of the same seed."""
    return is_random(operation) or operation.type in _LOST_IN_XLA


def _zeros_like(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        shape = tf.constant(list(tf.get_static_value(gradient.dense_shape)), tf.int64)
        return tf.IndexedSlices(_zeros_like(gradient.values), _zeros_like(gradient.indices), shape)
    return tf.zeros([1 if size is None else size for size in gradient.shape], gradient.dtype)
