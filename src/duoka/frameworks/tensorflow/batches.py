"""The arguments of `run`: what is split between replicas, and what every replica gets whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from duoka.errors import MismatchError
from duoka.frameworks.tensorflow.values import EachReplica, LocalParts, Rows


class Arguments:
    """Rows are split. Without any, plain tensors and arrays with rows are taken for the global batch."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], tell: Callable[[str], None]) -> None:
        self._structure = (tuple(args), dict(kwargs))
        self._leaves = tf.nest.flatten(self._structure)
        self._split_at = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Rows)]
        for leaf in self._leaves:
            if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
                raise MismatchError(
                    f"strategy.run was given a {type(leaf).__name__}, of which no rows can be taken yet.",
                    do="give dense tensors: tensor.to_tensor() or tf.sparse.to_dense.",
                )
            if isinstance(leaf, (EachReplica, LocalParts)):
                raise MismatchError(
                    "strategy.run was given what another strategy.run has returned.",
                    why="those values belong to replicas that have run.",
                    do="do both things in one step, or reduce the value first.",
                )
        if not self._split_at:
            self._split_at = [place for place, leaf in enumerate(self._leaves) if _has_rows(leaf)]
            if self._split_at:
                tell("strategy.run was given a plain batch: it is split like one of strategy.distribute_dataset")
        self.rows = [
            leaf.whole if isinstance(leaf := self._leaves[place], Rows) else tf.convert_to_tensor(leaf)
            for place in self._split_at
        ]
        self._check()

    def _check(self) -> None:
        if any(leaf.shape.rank is None for leaf in self.rows):
            raise MismatchError(
                "TensorFlow does not know how many dimensions a tensor of the batch has.",
                do="give it a shape in the dataset: tensor.set_shape or tf.ensure_shape.",
            )
        self.compare({int(leaf.shape[0]) for leaf in self.rows if leaf.shape[0] is not None})

    def compare(self, known: set[int]) -> None:
        """Numbers of rows."""
        if len(known) > 1:
            raise MismatchError(
                f"The tensors of a batch have {', '.join(map(str, sorted(known)))} rows.",
                why="replicas take parts of a batch, so that its tensors must have the same number of rows.",
                do="call .batch(n) on a dataset that gives single samples; give what belongs to no row beside batches"
                " of strategy.distribute_dataset: it goes to every replica whole.",
            )

    @property
    def have_known_rows(self) -> bool:
        """Whether a row is as long as any other of any batch: nothing in it is padded to the longest."""
        return all(leaf.shape[1:].is_fully_defined() for leaf in self.rows)

    def count_rows(self, num_replicas: int) -> Any:
        """Of the global batch, a number or a tensor. Without a batch, each replica counts as a row."""
        if not self.rows:
            return num_replicas
        static = self.rows[0].shape[0]
        return tf.shape(self.rows[0], tf.int64)[0] if static is None else int(static)

    def with_rows(self, rows: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these in the places of what is split."""
        leaves = list(self._leaves)
        for place, leaf in zip(self._split_at, rows, strict=True):
            leaves[place] = leaf
        args, kwargs = tf.nest.pack_sequence_as(self._structure, leaves)
        return args, kwargs


def _has_rows(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0
    return tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable) and bool(leaf.shape.rank)
