"""Steps that cannot wait for their end: they exchange at each update, with one replica on each worker.

Steps that use weights which they have just trained (some GANs), or that call `all_reduce`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from duoka.collectives.arrays import Array
from duoka.errors import MismatchError
from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.keras.host_tensorflow import TensorFlowHost
from duoka.frameworks.keras.tensorflow_rows import has_rows


class Middle:
    """What workers exchange while the step runs."""

    def __init__(self, wire: Wire, host: TensorFlowHost) -> None:
        self._wire, self._host = wire, host

    def exchange(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of all replicas' rows together. Slices are put behind each other, not added up."""
        is_eager = tf.executing_eagerly()
        is_sparse = [has_rows(gradient, is_eager=is_eager) for gradient in gradients]
        dense = [
            tf.convert_to_tensor(gradient)
            for gradient, sparse in zip(gradients, is_sparse, strict=True)
            if gradient is not None and not sparse
        ]
        like = [(list(gradient.shape), gradient.dtype.name) for gradient in dense]
        summed = iter(self._host.call(self._wire.sum_gradients, dense, like) if dense else [])
        return [
            None if gradient is None else self._gather(gradient) if sparse else next(summed)
            for gradient, sparse in zip(gradients, is_sparse, strict=True)
        ]

    def _gather(self, slices: Any) -> Any:
        like = [([None], slices.indices.dtype.name), ([None, *slices.values.shape[1:]], slices.values.dtype.name)]
        indices, values = self._host.call(self._wire.gather_slices, [slices.indices, slices.values], like)
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def all_reduce(self, is_mean: bool, value: Any) -> Any:
        """Differentiable: what a replica gives counts in the losses of all."""
        tensor = tf.convert_to_tensor(value)
        like = [(list(tensor.shape), tensor.dtype.name)]

        def sum_up(own: Array) -> list[Array]:
            weight = self._wire.weight if is_mean else float(self._wire.num_rows > 0)
            return self._wire.add_up([own], [weight])

        def forward(own: Any) -> Any:
            return tuple(self._host.call(sum_up, [own], like)), ()

        def backward(kept: Any, upstream: Sequence[Any]) -> Any:
            (gradient,) = self._host.call(self._wire.sum_moment_gradients, list(upstream), like)
            return gradient * self._weight(gradient.dtype) if is_mean else gradient

        return self._host.differentiable(forward, backward)(tensor)[0]

    def _weight(self, dtype: Any) -> Any:
        return self._host.call(lambda: [_number(self._wire.weight, dtype)], [], [([], dtype.name)])[0]


class Reasons:
    """Why functions exchange in their middle. By function, not by its code: around the same text there may be a model
    that needs it, and one that does not.
    """

    def __init__(self) -> None:
        self._by_owner: WeakKeyDictionary[Any, dict[Any, str]] = WeakKeyDictionary()

    def of(self, function: Any) -> str | None:
        owner, method = _owner_of(function)
        try:
            return self._by_owner.get(owner, {}).get(method)
        except TypeError:
            return None  # nobody can hold it weakly: it is found out at each call

    def keep(self, function: Any, reason: str) -> None:
        owner, method = _owner_of(function)
        with suppress(TypeError):
            self._by_owner.setdefault(owner, {})[method] = reason


def _owner_of(function: Any) -> tuple[Any, Any]:
    """A method is another object at each look: its object and its function stand for it."""
    function = inspect.unwrap(function)
    method = getattr(function, "__func__", None)
    return (function, None) if method is None else (function.__self__, method)


def refuse_more_replicas(name: str, reason: str, num_replicas: int, num_workers: int) -> None:
    if num_replicas != num_workers:
        raise MismatchError(
            f"{name} cannot run with {num_replicas} replicas on {num_workers} worker{'s' if num_workers > 1 else ''}:"
            f" {reason}.",
            why="it exchanges in its middle, where it cannot wait for a replica that has not started.",
            do=f"use one replica on each worker, replicas={num_workers}, or apply gradients at the end of the step.",
        )


def _number(value: float, dtype: Any) -> Array:
    return np.array(value, dtype.as_numpy_dtype)
