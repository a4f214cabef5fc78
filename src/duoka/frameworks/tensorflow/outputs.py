"""What a step returns: numbers are known on all workers after the exchange, arrays stay with their replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from duoka.errors import MismatchError
from duoka.frameworks.tensorflow.values import EachReplica, LocalParts

_NUMBER, _ARRAY, _ELSE = "number", "array", "else"


class Outputs:
    """The structure of what one replica's step has returned, and its tensors."""

    def __init__(self, returned: Any) -> None:
        self._structure = returned
        leaves = tf.nest.flatten(returned)
        self._leaves = [_as_tensor(leaf) for leaf in leaves]
        self._kinds = [_kind_of(leaf) for leaf in self._leaves]
        self.numbers = [_summable(leaf) for leaf in self._of(_NUMBER)]
        self.arrays = [leaf if leaf.shape.rank else leaf[tf.newaxis] for leaf in self._of(_ARRAY)]

    def _of(self, wanted: str) -> Iterator[Any]:
        return (leaf for leaf, kind in zip(self._leaves, self._kinds, strict=True) if kind == wanted)

    def rebuild(self, numbers: list[EachReplica], arrays: list[LocalParts]) -> Any:
        """The same structure, with a value for each replica in the place of each tensor."""
        given = {_NUMBER: iter(numbers), _ARRAY: iter(arrays), _ELSE: self._of(_ELSE)}
        return tf.nest.pack_sequence_as(self._structure, [next(given[kind]) for kind in self._kinds])


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, (tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor)):
        raise MismatchError(
            f"The step returns a {type(leaf).__name__}.", do="return tensors: tf.convert_to_tensor or .to_tensor()."
        )
    if tf.is_tensor(leaf) or isinstance(leaf, (tf.Variable, bool, int, float)) or hasattr(leaf, "__array__"):
        return tf.convert_to_tensor(leaf)
    return leaf


def _summable(number: Any) -> Any:
    """In a type that numbers can be added up in on their way."""
    if number.dtype == tf.bool:
        return tf.cast(number, tf.int32)
    return tf.cast(number, tf.float32) if number.dtype in (tf.float16, tf.bfloat16) else number


def _kind_of(leaf: Any) -> str:
    if not tf.is_tensor(leaf):
        return _ELSE
    if leaf.shape.rank is None:
        raise MismatchError(
            "The step returns a tensor of which TensorFlow does not know the number of dimensions.",
            do="give it a shape in the step: tensor.set_shape or tf.ensure_shape.",
        )
    return _NUMBER if leaf.shape.rank == 0 and leaf.dtype != tf.string else _ARRAY
