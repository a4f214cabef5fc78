"""The means that metrics keep, where a replica's own count of batches or rows would make them other means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from duoka.frameworks.switching import switching


@contextmanager
def tracking(factor: Any) -> Iterator[None]:
    """Around one run, or one tracing, of a step. The factor is n / n_r: rows of the batch by rows of the replica.

    A mean that is given one number without a weight counts batches: here each replica counts as its part of the batch.
    Keras does so itself for the losses of several outputs, in graphs for any number of rows.
    """

    def update_state(update: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and not len(getattr(values, "shape", ())):
            sample_weight = 1 / factor
        return update(metric, values, sample_weight=sample_weight)

    with switching([(keras.metrics.Mean, "update_state", update_state)]):
        yield
