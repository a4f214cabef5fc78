"""What the first batch shows of a step, and has to be said: it runs on other rows, too, and nothing of that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array
from duoka.frameworks.exchange.outcome import Outcome
from duoka.frameworks.keras.backend import Backend
from duoka.frameworks.keras.means import may_be_sums, say_no_mean, take_twice
from duoka.frameworks.keras.terms import MOST_TERMS, Terms


class FirstBatch:
    """Of one structure of batches, on the rows of one replica."""

    def __init__(
        self,
        backend: Backend,
        terms: Terms,
        tell: Callable[[str], None],
        *,
        batch: Any,
        rows: range,
        total_rows: int,
        replica: int,
        total_counts: Array | None,
    ) -> None:
        """`total_counts` are the denominators of loss terms, where they were exchanged."""
        self._backend, self._terms, self._tell = backend, terms, tell
        self._batch, self._rows, self._total_rows = batch, rows, total_rows
        self._replica, self._total_counts = replica, total_counts
        self._no_sums: list[int] = []  # places of variables of metrics

    def check_metrics(self, outcome: Outcome, other: Outcome) -> None:
        """A metric can be merged when what a batch adds to it does not depend on what is there already: on 0 or 1."""
        pairs = zip(outcome.metrics, other.metrics, strict=True)
        is_sum = [np.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True) for a, b in pairs]
        self._no_sums = [n for n, each in enumerate(is_sum) if not each]
        if self._no_sums:
            names = self._backend.name_metrics(self._no_sums)
            self._tell(
                f"{names} is not a sum over batches: what replicas add to it is added up, which is not the value of"
                " one device"
            )
        triples = zip(self._backend.own_logs, outcome.logs, other.logs, strict=True)
        derived = [name for name, a, b in triples if not np.allclose(a, b, rtol=1e-3, equal_nan=True)]
        if derived:
            self._tell(
                f"{', '.join(derived)} is made of metrics by the step: from what one replica has counted in one batch,"
                " which is not the value of one device; a metric of its own would be"
            )

    def check_other_rows(self, outcome: Outcome, *, is_training: bool) -> bool:
        """Metrics and losses that are the user's own. Gives whether there are any, and the step was run for them."""
        doubtful = [n for n in self._backend.find_doubtful_metrics() if n not in self._no_sums]
        has_metrics = bool(doubtful) and len(self._rows) > 1
        has_losses = is_training and may_be_sums(self._backend.model, self._terms)
        try:
            if has_metrics:
                self._check_counting(doubtful, outcome.metrics)
            if has_losses:
                self._check_means()
        except Exception:  # the step does not take so few rows: it cannot be found out, and nobody has asked
            return True
        return has_metrics or has_losses

    def _check_counting(self, doubtful: Sequence[int], whole: Sequence[Array]) -> None:
        """What rows add is what two halves of them add. What a batch adds, each replica would add once more."""
        middle = self._rows.start + len(self._rows) // 2
        first, second = (
            self._compute(self._backend.cut(self._batch, part), len(part)).metrics
            for part in (range(self._rows.start, middle), range(middle, self._rows.stop))
        )
        counting = [n for n in doubtful if _adds_more_in_halves(whole[n], first[n], second[n])]
        if counting:
            self._tell(
                f"{self._backend.name_metrics(counting)} counts batches rather than rows: every replica adds to it once"
                " for each batch, which is not the value of one device"
            )

    def _check_means(self) -> None:
        """Half of the rows, and these twice: no more than a step has memory for."""
        half = range(self._rows.start, self._rows.start + max(1, len(self._rows) // 2))
        both = range(2 * len(half))
        once = self._compute(self._backend.cut(self._batch, half), len(half)).gradients
        before = [np.copy(part) if isinstance(part, np.ndarray) else part for part in once]
        twice = self._compute(self._backend.cut(take_twice(self._batch, half), both), len(both)).gradients
        said = say_no_mean(self._backend.model, before, twice, is_random=self._backend.is_random)
        if said is not None:
            self._tell(said)

    def _compute(self, part: Any, num_rows: int) -> Outcome:
        """Of any rows, as if they were all of this replica's."""
        own = None
        if self._total_counts is not None:
            counted = self._backend.count(part, self._replica)
            own = np.pad(counted, (0, MOST_TERMS - len(counted)))
        factors = self._terms.factors(num_rows, self._total_rows, own, self._total_counts)
        return self._backend.compute(part, self._replica, factors)


def _adds_more_in_halves(whole: Array, first: Array, second: Array) -> bool:
    """By far: where layers draw, or normalise over rows, halves do not add up exactly."""
    whole, first, second = (np.asarray(part, np.float64) for part in (whole, first, second))
    excess = np.abs(first + second - whole).max(initial=0)
    return bool(excess > 0.4 * max(np.abs(first).max(initial=0), np.abs(second).max(initial=0)))
