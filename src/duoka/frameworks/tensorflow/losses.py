"""Losses inside `run` that are sums over rows divided by the size of the global batch, as tf.distribute teaches them.

Every replica's gradient is weighted by its part of the rows, n_r / n, so that means over rows are right as written.
These losses are parts of the global mean already: they keep their value, and pass back a gradient times n / n_r.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from duoka.errors import MismatchError
from duoka.frameworks.replacing import replacing_inside
from duoka.frameworks.tensorflow.graphs import graph_here, is_in_function_of


class Losses:
    """Of one replica's step. `factor` is n / n_r, `total_rows` is n; both may be tensors."""

    def __init__(self, factor: Any, total_rows: Any) -> None:
        self._factor, self._total_rows = factor, total_rows
        self._graph = graph_here()

    def average(self, per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
        """The sum over these rows by the rows of the global batch, or by the size that is given."""
        losses = weigh_rows(per_example_loss, sample_weight)
        size = self._total_rows if global_batch_size is None else global_batch_size
        return self._keep_value(tf.reduce_sum(losses) / tf.cast(size, losses.dtype))

    def scale(self, regularization_loss: Any) -> Any:
        """A part of a loss that does not depend on rows, such that all replicas' parts add up to it."""
        loss = tf.reduce_sum(tf.convert_to_tensor(regularization_loss))
        return self._keep_value(loss / tf.cast(self._factor, loss.dtype))

    def weigh(self, loss: Any, part: Any) -> Any:
        """A loss of which this part counts, instead of the replica's part of the rows."""
        return self._keep_value(tf.convert_to_tensor(loss), part)

    def _keep_value(self, value: Any, part: Any = 1.0) -> Any:
        self._refuse_inner_function()
        factor = tf.cast(self._factor, value.dtype) * tf.cast(part, value.dtype)

        @tf.custom_gradient
        def keep(value: Any) -> Any:
            return tf.identity(value), lambda upstream: upstream * factor

        return keep(value)

    def _refuse_inner_function(self) -> None:
        """A function keeps its trace, and the factors of this replica in it: another would compute with them."""
        if is_in_function_of(self._graph):
            raise MismatchError(
                "An average or scaled loss is computed inside a tf.function that the step calls.",
                why="TensorFlow keeps that function as it was traced, with the rows of one replica and one batch.",
                do="leave @tf.function away from it, and give the whole step to strategy.run as a tf.function.",
            )

    @contextmanager
    def patched(self) -> Iterator[None]:
        """`tf.nn.compute_average_loss` and `tf.nn.scale_regularization_loss` know the true global batch meanwhile.

        By whatever name: `tf.compat.v2.nn` has them too, and scripts bind them when they import them.
        """

        def compute_average_loss(
            per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
        ) -> Any:
            return self.average(per_example_loss, sample_weight, global_batch_size)

        with (
            replacing_inside(tf.nn.compute_average_loss, compute_average_loss),
            replacing_inside(tf.nn.scale_regularization_loss, self.scale),
        ):
            yield


def weigh_rows(per_example_loss: Any, sample_weight: Any) -> Any:
    losses = tf.convert_to_tensor(per_example_loss)
    if losses.shape.rank == 0:
        raise MismatchError(
            "average_loss was given one number.",
            why="it adds up one loss for each row, and divides by the rows of the global batch.",
            do="give the loss no reduction (reduction='none'), or use the mean as it is, without average_loss.",
        )
    if sample_weight is None:
        return losses
    weight = tf.cast(tf.convert_to_tensor(sample_weight), losses.dtype)
    if weight.shape.rank == losses.shape.rank + 1 and weight.shape[-1] in (1, None):
        weight = tf.squeeze(weight, -1)  # as TensorFlow does: (n, 1) times (n) would be (n, n)
    if weight.shape.rank > losses.shape.rank:
        raise MismatchError(
            f"average_loss was given losses of shape {losses.shape} and sample_weight of shape {weight.shape}.",
            why="a loss has one weight, and these would be several.",
            do="give one weight for each row.",
        )
    while weight.shape.rank < losses.shape.rank:
        weight = tf.expand_dims(weight, -1)
    return losses * weight
