"""The means that metrics keep, where a replica's own count of batches or rows would make them other means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops

from duoka.frameworks.replacing import for_this_thread, replacing


@contextmanager
def tracking(model: Any, factor: Any) -> Iterator[None]:
    """Around one run, or one tracing, of a step. The factor is n / n_r: rows of the batch by rows of the replica.

    A mean that is given one number without a weight counts batches: here each replica counts as its part of the batch.
    Keras does so itself for the losses of several outputs, in graphs for any number of rows. A loss that is not reduced
    counts as the mean of its rows, so that the factor of sums is taken out.
    """
    compiled = getattr(model, "_compile_loss", None)
    losses = [getattr(model, "_loss_tracker", None), *(compiled.metrics if compiled is not None else [])]
    loss_ids = {id(metric) for metric in losses}
    update = keras.metrics.Mean.update_state

    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        if len(getattr(values, "shape", ())):
            if id(metric) in loss_ids:
                values = values / ops.cast(factor, values.dtype)
        elif sample_weight is None:
            sample_weight = 1 / factor
        return update(metric, values, sample_weight=sample_weight)

    with replacing([(keras.metrics.Mean, "update_state", for_this_thread(update_state, update))]):
        yield
