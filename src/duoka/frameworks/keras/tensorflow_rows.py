"""Rows of a batch on TensorFlow, and the gradients that have some for each of them."""

from __future__ import annotations

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
    """These rows of a batch that was read, as tensors."""
    return data.cut(batch, rows, take=tf.convert_to_tensor)


def has_rows(gradient: Any, *, is_eager: bool) -> bool:
    """Slices that come from the rows of a batch, whose number a graph does not know; not those of positions."""
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    return is_eager or gradient.indices.shape[0] is None
