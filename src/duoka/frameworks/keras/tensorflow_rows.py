"""Rows of a batch on TensorFlow, and the gradients that have some for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree

from duoka.collectives.arrays import as_array
from duoka.errors import MismatchError
from duoka.frameworks.keras import data


def read(batch: Any) -> Any:
    """As arrays: to slice a tensor takes TensorFlow twenty times as long."""
    return tree.map_structure(_read_leaf, batch)


def _read_leaf(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if not isinstance(leaf, (tf.Tensor, np.ndarray)):
        raise MismatchError(
            f"A batch holds a {type(leaf).__name__}.",
            why="replicas take rows of arrays, and those of ragged or sparse ones cannot be taken yet.",
            do="let the dataset give dense tensors: tensor.to_tensor() or tf.sparse.to_dense.",
        )
    return leaf.numpy() if isinstance(leaf, tf.Tensor) and leaf.dtype == tf.string else as_array(leaf)


def cut(batch: Any, rows: range) -> Any:
    """These rows of a batch that was read, as tensors: in half the time of tf.convert_to_tensor."""
    return data.cut(batch, rows, take=tf.constant)


def has_rows(gradient: Any, *, is_eager: bool) -> bool:
    """Slices that come from the rows of a batch, whose number a graph does not know; not those of positions.

    Where steps run eagerly, all slices pass for rows: see `SlicesOfRows`.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    return is_eager or gradient.indices.shape[0] is None


class SlicesOfRows:
    """Which gradients have slices for the rows of a batch, and which for something else: a table of positions.

    The first graph tells, where everything but the number of rows is known. In one for batches of several lengths, the
    number of positions is not known either. Where steps run eagerly, it takes a run with another number of rows to
    tell: slices of rows are more, or fewer.
    """

    def __init__(self, *, is_eager: bool) -> None:
        self._is_eager = is_eager
        self._numbers: dict[int, set[int]] = {}  # of slices, by the id of the variable, while this is found out
        self._has_rows: dict[int, bool] | None = None
        self._in_first_graph: dict[int, bool] = {}  # by the id of the variable

    def learn(self, run: Callable[[Any], Any], rows: Any) -> bool:
        """After a run on these rows. True if that has to be done again, with what is known by now."""
        if not self._is_eager or self._has_rows is not None:
            return False
        try:
            if self._numbers:
                run(tree.map_structure(_twice, rows))
            self._has_rows = {key: len(numbers) > 1 for key, numbers in self._numbers.items()}
        except Exception:  # the step does not take so many rows: nobody has asked for them
            self._has_rows = dict.fromkeys(self._numbers, True)
        return bool(self._numbers)

    def has_rows(self, gradient: Any, variable: Any) -> bool:
        if not isinstance(gradient, tf.IndexedSlices):
            return False
        if not self._is_eager:
            return self._in_first_graph.setdefault(id(variable), has_rows(gradient, is_eager=False))
        if self._has_rows is None:
            self._numbers.setdefault(id(variable), set()).add(int(gradient.indices.shape[0]))
            return False
        return self._has_rows.get(id(variable), False)


def _twice(leaf: Any) -> Any:
    return leaf if leaf is None or not len(leaf.shape) else tf.concat([leaf, leaf], 0)
