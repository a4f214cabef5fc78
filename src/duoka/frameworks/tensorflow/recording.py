"""Notes what a replica's step hands to optimizers, of Keras or of `tf.compat.v1.train`, instead of applying it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from duoka.frameworks.replacing import definitions, replacing
from duoka.frameworks.tensorflow.other_backends import refuse_other_backends
from duoka.frameworks.tensorflow.variables import raw

# What is to happen instead of an update: it is given the update, and the optimizer's own method.
Instead = Callable[["Update", Callable[[Sequence[Any]], Any]], Any]


@dataclass
class Update:
    """One call of an optimizer."""

    optimizer: Any
    gradients: list[Any]
    variables: list[Any]
    global_step: Any = None  # a variable that the optimizer counts its updates in, of `tf.compat.v1.train`

    def apply(self, gradients: Sequence[Any]) -> None:
        """With the gradients of all replicas."""
        if isinstance(self.optimizer, BaseOptimizer):
            self.optimizer.apply(list(gradients), self.variables)
        else:
            self.optimizer.apply_gradients(list(zip(gradients, self.variables, strict=True)), self.global_step)


@contextmanager
def watching_updates(instead: Instead) -> Iterator[None]:
    """Around one run, or one tracing, of a step. What an optimizer's update calls itself is its own business."""
    is_inside = False

    def call(update: Update, apply: Callable[[Sequence[Any]], Any]) -> Any:
        nonlocal is_inside
        is_inside = True
        try:
            return instead(update, apply)
        finally:
            is_inside = False

    def make_apply(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if is_inside:
                return original(optimizer, grads, trainable_variables)
            known = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
            return call(Update(optimizer, list(grads), known), lambda given: original(optimizer, given, known))

        return apply

    def make_apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply_gradients(optimizer: Any, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
            pairs = list(grads_and_vars)
            if is_inside:
                return original(optimizer, pairs, global_step, name)

            gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]

            def apply(given: Sequence[Any]) -> Any:
                return original(optimizer, list(zip(given, variables, strict=True)), global_step, name)

            result = call(Update(optimizer, gradients, variables, global_step), apply)
            return tf.no_op() if result is None else result

        return apply_gradients

    keras_s = [(kind, name, make_apply(method)) for kind, name, method in definitions(BaseOptimizer, ["apply"])]
    known = definitions(tf.compat.v1.train.Optimizer, ["apply_gradients"])
    old_ones = [(kind, name, make_apply_gradients(method)) for kind, name, method in known]
    with replacing([*(refuse_other_backends() or keras_s), *old_ones]):
        yield


def slots_of(optimizer: Any) -> list[Any]:
    """The optimizer's own variables, the learning rate of Keras's among them."""
    variables = optimizer.variables
    return [raw(variable) for variable in (variables() if callable(variables) else variables)]
