"""Notes what a replica's step hands to optimizers, of Keras or of `tf.compat.v1.train`, instead of applying it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from duoka.frameworks.replacing import definitions, replacing

# What is to happen instead of an update: the optimizer's own method, the optimizer, gradients, variables.
Instead = Callable[[Callable[..., Any], Any, list[Any], list[Any]], Any]


@dataclass
class Update:
    """One call of an optimizer."""

    optimizer: Any
    gradients: list[Any]
    variables: list[Any]

    def apply(self, gradients: Sequence[Any]) -> None:
        """With the gradients of all replicas."""
        if isinstance(self.optimizer, BaseOptimizer):
            self.optimizer.apply(list(gradients), self.variables)
        else:
            self.optimizer.apply_gradients(list(zip(gradients, self.variables, strict=True)))


@contextmanager
def watching_updates(instead: Instead) -> Iterator[None]:
    """Around one run, or one tracing, of a step. What an optimizer's update calls itself is its own business."""
    is_inside = False

    def call(original: Callable[..., Any], optimizer: Any, gradients: Iterable[Any], variables: Iterable[Any]) -> Any:
        nonlocal is_inside
        is_inside = True
        try:
            return instead(original, optimizer, list(gradients), list(variables))
        finally:
            is_inside = False

    def make_apply(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if is_inside:
                return original(optimizer, grads, trainable_variables)
            known = optimizer._trainable_variables if trainable_variables is None else trainable_variables
            return call(original, optimizer, grads, known)

        return apply

    def make_apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply_gradients(optimizer: Any, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
            pairs = list(grads_and_vars)
            if is_inside:
                return original(optimizer, pairs, global_step, name)

            def apply(optimizer: Any, gradients: list[Any], variables: list[Any]) -> Any:
                return original(optimizer, list(zip(gradients, variables, strict=True)), global_step, name)

            result = call(apply, optimizer, [gradient for gradient, _ in pairs], [variable for _, variable in pairs])
            if result is None and global_step is not None:
                global_step.assign_add(1)
            return tf.no_op() if result is None else result

        return apply_gradients

    keras_s = [(kind, name, make_apply(method)) for kind, name, method in definitions(BaseOptimizer, ["apply"])]
    known = definitions(tf.compat.v1.train.Optimizer, ["apply_gradients"])
    old_ones = [(kind, name, make_apply_gradients(method)) for kind, name, method in known]
    with replacing([*keras_s, *old_ones]):
        yield
