"""The means of losses that Keras reports, where a replica's own count of rows would make them other means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keras import ops


@contextmanager
def tracking(model: Any, factor: Any) -> Iterator[None]:
    """Around one run, or one tracing, of a step. The factor is n / n_r: rows of the batch by rows of the replica.

    Two cases differ. A loss that is not reduced counts as the mean of its rows, so that the factor of sums is taken
    out. In a graph for any number of rows Keras counts the losses of several outputs once per batch, not once per row:
    here each replica counts as its part of the batch.
    """
    trackers = [(model._loss_tracker, False)] if getattr(model, "_loss_tracker", None) is not None else []
    compiled = getattr(model, "_compile_loss", None)
    trackers += [(metric, True) for metric in (compiled.metrics if compiled is not None else [])]
    for tracker, is_of_output in trackers:
        tracker.__dict__["update_state"] = _updating(tracker.update_state, is_of_output, factor)
    try:
        yield
    finally:
        for tracker, _ in trackers:
            tracker.__dict__.pop("update_state", None)


def _updating(update: Callable[..., Any], is_of_output: bool, factor: Any) -> Callable[..., Any]:
    def update_state(values: Any, sample_weight: Any = None) -> Any:
        if len(getattr(values, "shape", ())):
            return update(values / ops.cast(factor, values.dtype), sample_weight=sample_weight)
        if is_of_output and sample_weight is None:
            return update(values, sample_weight=1 / factor)
        return update(values, sample_weight=sample_weight)

    return update_state
