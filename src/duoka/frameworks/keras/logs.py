"""What a step reports: numbers that metrics keep are read from them; the others are means over replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from duoka.errors import MismatchError


def metric_results(model: Any) -> dict[str, Any]:
    """Everything the metrics can tell, under the names that a step may use for it."""
    results = {metric.name: metric.result() for metric in model.metrics}
    results.update(model.get_metrics_result())
    return results


def split(reported: Any, known: dict[str, Any], tell: Callable[[str], None]) -> tuple[list[str], dict[str, Any]]:
    """The names that a step reports, in its order, and those of its numbers that no metric keeps."""
    if not isinstance(reported, dict):
        raise MismatchError(
            f"A train_step returned a {type(reported).__name__}.",
            do="let it return a dictionary of numbers by name, such as self.compute_metrics(...).",
        )
    names, own = [], {}
    for name, value in reported.items():
        if name not in known:
            value = ops.convert_to_tensor(value)
            if len(value.shape):
                tell(f"{name!r} is not one number, and is left out of the logs")
                continue
            own[name] = ops.cast(value, "float32")
        names.append(name)
    return names, own
