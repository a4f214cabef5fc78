"""The means that metrics keep, where a replica's own count of batches or rows would make them other means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from duoka.frameworks.replacing import for_this_thread, replacing


@contextmanager
def tracking(factor: Any) -> Iterator[None]:
    """Around one run, or one tracing, of a step. The factor is n / n_r: rows of the batch by rows of the replica.

    A mean that is given one number without a weight counts batches: here each replica counts as its part of the batch.
    Keras does so itself for the losses of several outputs, in graphs for any number of rows.
    """
    update = keras.metrics.Mean.update_state

    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and not len(getattr(values, "shape", ())):
            sample_weight = 1 / factor
        return update(metric, values, sample_weight=sample_weight)

    with replacing([(keras.metrics.Mean, "update_state", for_this_thread(update_state, update))]):
        yield
