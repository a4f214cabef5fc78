"""What came of evaluations between loops. A script that is resumed comes by them again, with the weights of later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from duoka.frameworks.torch.totals import Metrics

_MOST = 4096
_LONGEST = 1024  # numbers


@dataclass(frozen=True)
class Outcome:
    metrics: Metrics | None  # None: no replica had a row
    totals: np.ndarray


class Recollections:
    """By their numbers. Those in finished epochs of `strategy.epochs` are forgotten: no script comes by them again."""

    def __init__(self) -> None:
        self._outcomes: dict[int, Outcome] = {}
        self._number = 0  # of the last one
        self._at_loop = 0  # the same, when the loop over epochs began
        self._at_epoch = 0  # the same, when its epoch under way did
        self._at_ends: dict[int, int] = {}  # the same, at the ends of loops over epochs

    def come_by(self) -> Outcome | None:
        """Another one begins: what came of it in the run that was saved."""
        self._number += 1
        return self._outcomes.get(self._number)

    def keep(self, outcome: Outcome) -> None:
        if len(self._outcomes) < _MOST and len(outcome.totals) <= _LONGEST:
            self._outcomes[self._number] = outcome

    def begin_epochs(self) -> None:
        self._at_loop = self._number

    def begin_epoch(self, is_resumed: bool) -> None:
        if is_resumed:
            self._number = self._at_epoch
            return
        self._at_epoch = self._number
        self._outcomes = {number: each for number, each in self._outcomes.items() if number <= self._at_loop}

    def end_epochs(self, call: int) -> None:
        self._at_ends[call] = self._number

    def leave_out_epochs(self, call: int) -> None:
        self._number = self._at_ends.get(call, self._number)

    def capture(self) -> dict[str, Any]:
        outcomes = self._outcomes.values()
        return {
            "numbers": list(self._outcomes),
            "metrics": [None if each.metrics is None else each.metrics.encode().decode() for each in outcomes],
            "totals": np.concatenate([np.empty(0), *(each.totals for each in outcomes)]),
            "number": self._number,
            "at_epoch": self._at_epoch,
            "at_ends": [[call, number] for call, number in self._at_ends.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """For a script that is led to this state."""
        self._outcomes = {}
        start = 0
        for number, text in zip(state["numbers"], state["metrics"], strict=True):
            metrics = None if text is None else Metrics.decode(text.encode())
            end = start + (0 if metrics is None else metrics.size)
            self._outcomes[number] = Outcome(metrics, state["totals"][start:end])
            start = end
        self._at_epoch, self._at_ends = state["at_epoch"], dict(state["at_ends"])

    def arrive(self, state: dict[str, Any]) -> None:
        """The script has come to it."""
        self._number = state["number"]
