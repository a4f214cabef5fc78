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
from duoka.frameworks.keras.first_batch import FirstBatch
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
                ready[first] = self._check(batch, ready[first], first, counts, total_counts)
            self._terms.name_single_numbers(self._tell)
            if names := self._backend.name_unknown_state():
                self._tell(f"{names}: what replicas make of it is merged to a mean, weighted by rows, as for BatchNorm")
        transfer = self._transfer_for(ready[first], first, total_rows)
        kind = "step" if self._is_training else "validation after step"
        name = f"of {kind} {self._progress.step}, {total_rows} rows"
        exchange = transfer.open(name, is_tried=self._is_training)
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

    def _check(
        self,
        batch: Any,
        outcome: Outcome,
        replica: int,
        counts: dict[int, Array] | None,
        total_counts: Array | None,
    ) -> Outcome:
        """Say what the first batch of its kind shows; gives the outcome again, where it may have been written over."""
        assert self._progress.rows is not None
        first = FirstBatch(
            self._backend,
            self._terms,
            self._tell,
            batch=batch,
            rows=rows_to_compute(self._progress.rows, self._collective.num_replicas, replica),
            total_rows=self._progress.rows,
            replica=replica,
            total_counts=total_counts,
        )
        first.check_metrics(outcome, self._compute(batch, replica, counts, total_counts, start=1.0))
        has_run = first.check_other_rows(outcome, is_training=self._is_training)
        return self._compute(batch, replica, counts, total_counts) if has_run else outcome

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
