"""Keras on another backend than TensorFlow, met in a step of `strategy.run`: its tensors are not TensorFlow's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from duoka.errors import MismatchError
from duoka.frameworks.replacing import Replacement, definitions


def refuse_other_backends() -> list[Replacement]:
    """What stands in while a step runs, or is traced; nothing where Keras runs on TensorFlow."""
    if keras.backend.backend() == "tensorflow":
        return []
    optimizers = [(kind, name, _apply) for kind, name, _ in definitions(BaseOptimizer, ["apply"])]
    return [*optimizers, (keras.Layer, "__call__", _make_call(keras.Layer.__call__))]


def _apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    raise _refusal(optimizer)


def _make_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        is_given = any(map(tf.is_tensor, tf.nest.flatten((args, kwargs))))
        if is_given and (layer.trainable or not tf.executing_eagerly()):  # a frozen one may compute something beside
            raise _refusal(layer)
        return original(layer, *args, **kwargs)

    return call


def _refusal(thing: Any) -> MismatchError:
    return MismatchError(
        f"A step of strategy.run uses the {type(thing).__name__} {thing.name}, and Keras runs on"
        f" {keras.backend.backend()} here.",
        why="a loop of TensorFlow can only train what is made of TensorFlow's variables.",
        do="set KERAS_BACKEND=tensorflow before Keras is imported.",
    )
