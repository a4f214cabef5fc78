"""What came of evaluations between loops. A script that is resumed comes by them again, with the weights of later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from duoka.frameworks.torch.totals import Metrics

_MOST_NUMBERS = 1 << 19  # 4 MB


@dataclass(frozen=True)
class Outcome:
    metrics: Metrics | None  # None: no replica had a row
    totals: np.ndarray


class Recollections:
    """By the places of the script where they were made, and in which order there."""

    def __init__(self) -> None:
        self._outcomes: dict[str, Outcome] = {}
        self._num_numbers = 0  # in all of them
        self._place, self._number = "", 0  # of the last one

    def come_by(self, place: str) -> Outcome | None:
        """Another one begins: what came of it in the run that was saved."""
        self._number = self._number + 1 if place == self._place else 0
        self._place = place
        return self._outcomes.get(self._key)

    @property
    def _key(self) -> str:
        return f"{self._place} {self._number}"

    def keep(self, outcome: Outcome) -> None:
        if self._num_numbers + len(outcome.totals) <= _MOST_NUMBERS:
            self._outcomes[self._key] = outcome
            self._num_numbers += len(outcome.totals)

    def forget(self, stretch: str) -> None:
        """No script comes by these places again, but by others with their names."""
        if self._place.startswith(f"{stretch} "):
            self._place = ""
        self._outcomes = {key: each for key, each in self._outcomes.items() if not key.startswith(f"{stretch} ")}
        self._count()

    def _count(self) -> None:
        self._num_numbers = sum(len(each.totals) for each in self._outcomes.values())

    def capture(self) -> dict[str, Any]:
        outcomes = self._outcomes.values()
        numbers = {metrics: n for n, metrics in enumerate(dict.fromkeys(each.metrics for each in outcomes))}
        return {
            "keys": list(self._outcomes),
            "metrics": [None if metrics is None else metrics.encode().decode() for metrics in numbers],
            "which": np.array([numbers[each.metrics] for each in outcomes], np.int64),
            "totals": np.concatenate([np.empty(0), *(each.totals for each in outcomes)]),
            "last": [self._place, self._number],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """For a script that is led to this state."""
        self._outcomes = {}
        start = 0
        known = [None if text is None else Metrics.decode(text.encode()) for text in state["metrics"]]
        for key, which in zip(state["keys"], state["which"].tolist(), strict=True):
            metrics = known[which]
            end = start + (0 if metrics is None else metrics.size)
            self._outcomes[key] = Outcome(metrics, state["totals"][start:end])
            start = end
        self._count()

    def arrive(self, state: dict[str, Any]) -> None:
        """The script has come to it."""
        self._place, self._number = state["last"]
