"""A global batch: how many rows it has, and a digest that tells whether all workers see the same one."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from keras import tree

from duoka.collectives.arrays import Array, as_array
from duoka.errors import MismatchError

_DIGEST_BYTES = 4096  # of each array: its first rows differ when the order does
_DIGEST_VALUES = 4096  # more of each array, spread over all of its rows: at least one of each, at most
_VALUES_PER_ROW = 8


def leaves_of(batch: Any) -> list[Any]:
    return [leaf for leaf in tree.flatten(batch) if getattr(leaf, "shape", None) is not None and len(leaf.shape)]


def count_rows(batch: Any) -> int:
    """All arrays of a batch have the same number of rows; numbers without rows go to every replica."""
    counts = {int(leaf.shape[0]) for leaf in leaves_of(batch)}
    if len(counts) != 1:
        raise MismatchError(
            f"The arrays of a batch have {', '.join(map(str, sorted(counts))) or 'no'} rows.",
            why="replicas take parts of a batch, so that its arrays must have the same number of rows.",
            do="let x, y and sample_weight of a batch have one row for each sample.",
        )
    count = counts.pop()
    if count == 0:
        raise MismatchError(
            "A batch has no rows.",
            why="a loss has no mean over no rows, and replicas have nothing to share.",
            do="leave empty batches out: dataset.filter, or an `if len(x)` before `yield`.",
        )
    return count


def structure(batch: Any) -> tuple[Any, ...]:
    """Equal for batches that a step treats alike: with or without weights, say."""
    leaves = tree.flatten(batch)
    return type(batch), *((str(leaf.dtype), len(leaf.shape)) if hasattr(leaf, "shape") else None for leaf in leaves)


def cut(batch: Any, rows: range, take: Callable[[Any], Any] = lambda part: part) -> Any:
    """These rows of each array; numbers without rows, and what is not there, as they are."""

    def cut_leaf(leaf: Any) -> Any:
        return take(leaf[rows.start : rows.stop]) if len(getattr(leaf, "shape", None) or ()) else leaf

    return tree.map_structure(cut_leaf, batch)


def digest(batch: Any) -> int:
    """The same number for the same rows in the same order, nearly always another one otherwise.

    It is made of the first rows and of some values of every row: to read all takes longer than many a step.
    """
    number = 0
    for leaf in leaves_of(batch):
        try:
            array = as_array(leaf)
        except (MismatchError, TypeError):
            continue  # ragged, sparse, or text
        if array.dtype.kind not in "OSUV":
            first = array[: max(1, _DIGEST_BYTES * len(array) // max(1, array.nbytes))]
            for part in (first, _some_of_each_row(array)):
                number = zlib.crc32(np.ascontiguousarray(part).data, number)
    return number


def _some_of_each_row(array: Array) -> Array:
    """The same ones however the array lies in memory."""
    row = array.shape[1:]
    return array[_places(row, len(array))] if row and array.size else array


@functools.cache
def _places(row: tuple[int, ...], num_rows: int) -> tuple[Any, ...]:
    num_values = math.prod(row)
    count = min(num_values, _VALUES_PER_ROW, max(1, _DIGEST_VALUES // num_rows))
    every: tuple[Any, ...] = (slice(None),)
    return every + np.unravel_index(np.arange(count) * num_values // count, row)
