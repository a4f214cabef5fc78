"""The course of one global batch: each replica's rows, the exchange, and one update, the same on every worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.data.shares import rows_to_compute, share
from duoka.frameworks.exchange.memory import Memory
from duoka.frameworks.exchange.note import Note, compare
from duoka.frameworks.exchange.outcome import Outcome, Slices
from duoka.frameworks.exchange.transfer import Transfer, digest_of
from duoka.frameworks.keras.backend import Backend
from duoka.frameworks.keras.data import count_rows, digest, structure
from duoka.frameworks.keras.terms import MOST_TERMS, START, Terms


class Progress:
    """How far the run is, over all models of a strategy."""

    def __init__(self) -> None:
        self.step = 0
        self.batch = 0  # counts validation, too
        self.rows: int | None = None  # of the global batch under way


class Steps:
    def __init__(
        self,
        collective: Collective,
        memory: Memory,
        backend: Backend,
        terms: Terms,
        progress: Progress,
        tell: Callable[[str], None],
        *,
        is_training: bool,
    ) -> None:
        self._collective, self._memory, self._backend, self._terms = collective, memory, backend, terms
        self._progress, self._tell, self._is_training = progress, tell, is_training
        self._kinds: dict[Any, list[str]] = {}  # of loss terms, by the structure of a batch
        self._transfers: dict[Any, Transfer] = {}
        self._no_sums: list[int] = []  # places of variables of metrics

    def run(self, batch: Any, state: Any = None) -> dict[str, Any]:
        """Train, or validate, on one global batch; gives the logs. A worker that is lost on the way is made up for."""
        self._backend.begin_batch(self._progress.batch, state)
        self._progress.batch += 1
        batch = self._backend.read(batch)
        total_rows = self._progress.rows = count_rows(batch)
        ready: dict[int, Outcome] = {}
        first, is_new = self._collective.replicas[0], False
        key = structure(batch)
        if key in self._kinds:
            self._terms.kinds = self._kinds[key]
        else:
            # The first run of all shows what the step computes; where terms need corrections, it runs again.
            outcome = self._compute(batch, first, None, None)
            is_new, self._kinds[key] = True, self._terms.kinds
            if self._terms.are_means:
                ready[first] = outcome
        counts, total_counts = self._exchange_counts(batch, total_rows)
        if first not in ready:
            ready[first] = self._compute(batch, first, counts, total_counts)
        if is_new:
            if self._backend.is_repeatable:
                self._check_metrics(ready[first], self._compute(batch, first, counts, total_counts, start=1.0))
                self._check_counting(batch, first, ready[first])
            self._terms.name_single_numbers(self._tell)
            if names := self._backend.name_unknown_state():
                self._tell(f"{names}: what replicas make of it is merged to a mean, weighted by rows, as for BatchNorm")
        transfer = self._transfer_for(ready[first], first, total_rows)
        kind = "step" if self._is_training else "validation after step"
        exchange = transfer.open(f"of {kind} {self._progress.step}, {total_rows} rows")
        data = digest(batch)

        def place(replica: int) -> bytes:
            num_rows = len(share(total_rows, self._collective.num_replicas, replica))
            if num_rows == 0:
                transfer.write_nothing(exchange, replica)
                return b""
            is_ready = replica in ready
            outcome = ready.pop(replica) if is_ready else self._compute(batch, replica, counts, total_counts)
            transfer.write(exchange, replica, outcome, num_rows)
            return Note(data, outcome.rate, self._digest_others(outcome)).pack()

        exchange.carry_out(place)
        compare(exchange.notes, self._progress.step, self._tell)
        total = transfer.read(exchange)
        exchange.release()
        logs = self._backend.apply(total)
        self._collective.end_step()
        self._progress.step += self._is_training
        return logs

    def _compute(
        self,
        batch: Any,
        replica: int,
        counts: dict[int, Array] | None,
        total_counts: Array | None,
        start: float = 0.0,
    ) -> Outcome:
        num_replicas, total_rows = self._collective.num_replicas, self._progress.rows
        assert total_rows is not None
        self._collective.work_on(self._progress.step, (replica,))
        rows = rows_to_compute(total_rows, num_replicas, replica)
        own = None
        if counts is not None:
            own = counts[replica] if replica in counts else self._count(batch, replica)
        factors = self._terms.factors(len(rows), total_rows, own, total_counts)
        factors[START] = start
        return self._backend.compute(self._backend.cut(batch, rows), replica, factors)

    def _check_metrics(self, outcome: Outcome, other: Outcome) -> None:
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

    def _check_counting(self, batch: Any, replica: int, whole: Outcome) -> None:
        """What rows add is what two halves of them add. What a batch adds, each replica would add once more."""
        assert self._progress.rows is not None
        rows = rows_to_compute(self._progress.rows, self._collective.num_replicas, replica)
        doubtful = [n for n in self._backend.find_doubtful_metrics() if n not in self._no_sums]
        if not doubtful or len(rows) < 2:
            return
        middle = rows.start + len(rows) // 2
        halves = []
        try:
            for part in (range(rows.start, middle), range(middle, rows.stop)):
                factors = self._terms.factors(len(part), self._progress.rows, None, None)
                halves.append(self._backend.compute(self._backend.cut(batch, part), replica, factors).metrics)
        except Exception:  # the step does not take so few rows: it cannot be found out, and nobody has asked
            return
        counting = [n for n in doubtful if _adds_more_in_halves(whole.metrics[n], halves[0][n], halves[1][n])]
        if counting:
            self._tell(
                f"{self._backend.name_metrics(counting)} counts batches rather than rows: every replica adds to it once"
                " for each batch, which is not the value of one device"
            )

    def _transfer_for(self, outcome: Outcome, replica: int, total_rows: int) -> Transfer:
        """Made once for each size of batch, and for each number of slices in its gradients."""
        num_slices = tuple(len(part.indices) for part in outcome.gradients if isinstance(part, Slices))
        key = total_rows, replica, num_slices
        if key not in self._transfers:
            num_rows = len(rows_to_compute(total_rows, self._collective.num_replicas, replica))
            self._transfers[key] = Transfer(self._collective, self._memory, outcome, num_rows, total_rows)
        return self._transfers[key]

    def _digest_others(self, outcome: Outcome) -> int:
        seeds = {id(seed) for seed in self._backend.seeds}
        pairs = zip(self._backend.others, outcome.others, strict=True)
        return digest_of([array for variable, array in pairs if id(variable) not in seeds])

    # Denominators that are not numbers of rows.

    def _exchange_counts(self, batch: Any, total_rows: int) -> tuple[dict[int, Array] | None, Array | None]:
        """For loss terms with denominators of their own: each local replica's, and their sums."""
        if not self._terms.are_counted:
            return None, None
        buffer = self._collective.scratch(MOST_TERMS, np.float64)
        exchange = self._collective.exchange([buffer], f"of denominators of step {self._progress.step}")
        counts: dict[int, Array] = {}

        def place(replica: int) -> bytes:
            has_rows = bool(share(total_rows, self._collective.num_replicas, replica))
            counts[replica] = self._count(batch, replica) if has_rows else np.zeros(MOST_TERMS)
            exchange.slot(buffer, replica)[:] = counts[replica]
            return b""

        exchange.carry_out(place)
        total = exchange.result(buffer).copy()
        exchange.release()
        return counts, total

    def _count(self, batch: Any, replica: int) -> Array:
        self._collective.work_on(self._progress.step, (replica,))
        assert self._progress.rows is not None
        rows = rows_to_compute(self._progress.rows, self._collective.num_replicas, replica)
        counts = np.zeros(MOST_TERMS)
        counted = self._backend.count(self._backend.cut(batch, rows), replica)
        counts[: len(counted)] = counted
        return counts


def _adds_more_in_halves(whole: Array, first: Array, second: Array) -> bool:
    """By far: where layers draw, or normalise over rows, halves do not add up exactly."""
    whole, first, second = (np.asarray(part, np.float64) for part in (whole, first, second))
    excess = np.abs(first + second - whole).max(initial=0)
    return bool(excess > 0.4 * max(np.abs(first).max(initial=0), np.abs(second).max(initial=0)))
