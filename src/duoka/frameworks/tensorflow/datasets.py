"""Datasets for `run`: global batches in, the rows of replicas out."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from duoka.errors import MismatchError
from duoka.frameworks.tensorflow.values import Rows


class InputContext(tf.distribute.InputContext):
    """For functions that make a dataset of batches for one replica each; remembers the size that they asked for."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=num_replicas)
        self.per_replica: int | None = None

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        size: int = super().get_per_replica_batch_size(global_batch_size)
        self.per_replica = size
        return size


def check(dataset: Any) -> Any:
    """A dataset that replicas can take rows of. With one replica, too: a script must not fail on the second card."""
    if not isinstance(dataset, tf.data.Dataset):
        raise MismatchError(
            f"strategy.distribute_dataset was given a {type(dataset).__name__}.",
            do="give it a tf.data.Dataset; batches of anything else can be given to strategy.run as they are.",
        )
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec):
            raise MismatchError(
                f"The dataset gives {type(spec).__name__.removesuffix('Spec')}s, of which no rows can be taken yet.",
                do="let it give dense tensors: tensor.to_tensor() or tf.sparse.to_dense.",
            )
        if spec.shape.rank == 0:
            raise MismatchError(
                f"The dataset has no batch dimension: {dataset.element_spec}.",
                why="its elements are single samples, and replicas take rows of batches.",
                do="call .batch(n) on it, with the size of the global batch; give numbers that belong to no row to"
                " strategy.run beside the batch.",
            )
    return dataset


def distribute(dataset: Any) -> Any:
    """The same dataset, whose batches are known to be global ones. Every worker reads it; replicas take their rows."""
    kind = check(dataset).element_spec  # a named tuple stays one

    def take(*batch: Any) -> Any:
        return tf.nest.pack_sequence_as(kind, [Rows(leaf) for leaf in tf.nest.flatten(batch)])

    return dataset.map(take)


def from_function(dataset: Any, context: InputContext) -> Any:
    """Batches for one replica each, put together to global ones."""
    if not isinstance(dataset, tf.data.Dataset):
        raise MismatchError(
            f"The function gave a {type(dataset).__name__}.", do="let it return a tf.data.Dataset of batches."
        )
    specs = tf.nest.flatten(dataset.element_spec)
    size = context.per_replica or next((spec.shape[0] for spec in specs if spec.shape.rank), None)
    if size is None:
        raise MismatchError(
            "It cannot be seen how many rows a batch of this dataset has.",
            why="the function gives batches for one replica each, which are put together to global ones.",
            do="let it call context.get_per_replica_batch_size(global_batch_size), or use drop_remainder=True.",
        )
    return dataset.rebatch(size * context.num_replicas_in_sync)
