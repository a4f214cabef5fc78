"""What a loop holds in its hands: rows of a global batch on their way in, one value for each replica on its way out.

TensorFlow takes them through `tf.function` and `tf.data` as it takes tensors.
"""

from __future__ import annotations

from typing import Any, NoReturn

import tensorflow as tf

from duoka.errors import MismatchError


def _refuse_reading(value: Any, *_: Any) -> NoReturn:
    raise MismatchError(
        "What strategy.run has returned was read as one value.",
        why="it holds a value from each replica.",
        do='take strategy.reduce("mean", value) or strategy.reduce("sum", value) of it first; strategy.gather and'
        " strategy.experimental_local_results give the values themselves.",
    )


class Rows(tf.experimental.ExtensionType):
    """The rows of a whole global batch. Inside `strategy.run` each replica finds its own part of them."""

    whole: tf.Tensor

    @property
    def shape(self) -> Any:
        return self.whole.shape

    @property
    def dtype(self) -> Any:
        return self.whole.dtype


class EachReplica(tf.experimental.ExtensionType):
    """A number from each replica, known on all workers: it came with the exchange of the step."""

    values: tf.Tensor  # (replicas)
    total: tf.Tensor  # added up in tree order; replicas without rows are left out
    mean: tf.Tensor  # weighted by rows

    __float__ = __int__ = numpy = _refuse_reading


class LocalParts(tf.experimental.ExtensionType):
    """An array from each replica of this worker, one behind the other; those of other workers are with them."""

    joined: tf.Tensor
    lengths: tf.Tensor  # of the parts
    replicas: tf.Tensor  # whose they are
    rows: tf.Tensor  # how many rows of the batch each of them has

    __float__ = __int__ = numpy = _refuse_reading


def is_each(value: Any) -> bool:
    return isinstance(value, (Rows, EachReplica, LocalParts))


def split_parts(parts: LocalParts) -> list[Any]:
    """Outside of a graph: the parts, in the order of replicas."""
    return list(tf.split(parts.joined, parts.lengths))
