"""Whether metrics are the same for any number of replicas: on two parts of some samples, and on both together.

A sum that is returned as a number, (sum, 1) and exp(loss) are not: each depends on how many samples a replica has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from duoka.frameworks.torch.function.returned import ALONE, Measured, Rows, combine

_TOLERANCE = 3e-2  # relative: of 16 bits. A sum in the place of a mean differs by far more


class MetricProbe:
    """Keeps the metrics of each run on some samples."""

    def __init__(self) -> None:
        self._measured: dict[tuple[int, int], Measured] = {}

    def note(self, metrics: Mapping[str, Any], start: int, stop: int) -> None:
        added_up = {name: metric for name, metric in metrics.items() if not isinstance(metric, Rows)}
        self._measured[start, stop] = Measured.of(added_up, stop - start)

    def find(self, sizes: tuple[int, int]) -> tuple[str, float, float] | None:
        """Return the first metric that differs: its name, its value on all samples, and what its parts combine to."""
        first, count = sizes[0], sum(sizes)
        part, other, whole = (self._measured.get(each) for each in ((0, first), (first, count), (0, count)))
        if part is None or other is None or whole is None or not part.kinds == other.kinds == whole.kinds:
            return None  # kinds that differ are an error where replicas' metrics are put together
        combined = _named(part.kinds, part.numbers + other.numbers)
        for name, value in _named(whole.kinds, whole.numbers).items():
            difference, largest = np.abs(value - combined[name]), max(np.abs(value).max(), np.abs(combined[name]).max())
            place = int(difference.argmax())
            if difference.reshape(-1)[place] > _TOLERANCE * largest:
                return name, float(value.reshape(-1)[place]), float(combined[name].reshape(-1)[place])
        return None


def _named(kinds: Any, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Numbers that are NaN, for want of anything to count, are 0."""
    found = combine(kinds, numbers, [], torch.device("cpu"))
    named = found if isinstance(found, dict) else {ALONE: found}
    return {name: np.nan_to_num(np.asarray(value, np.float64)) for name, value in named.items() if np.size(value)}
