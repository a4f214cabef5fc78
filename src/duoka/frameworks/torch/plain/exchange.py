"""Plain style: gradients are exchanged when a backward ends, and `p.grad` is the mean over the global batch.

Exactly the gradients that have arrived since the last exchange are exchanged (see arrivals.py): a second backward, or
one nested in another (reentrant checkpointing), is an exchange of its own. They are added to what `p.grad` held before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from duoka.collectives.collective import Buffer, Collective, Exchange
from duoka.errors import MismatchError
from duoka.frameworks.torch.function.gradient_buffers import GradientBuffers
from duoka.frameworks.torch.function.note import Note, Notes
from duoka.frameworks.torch.function.trained import Trained
from duoka.frameworks.torch.learning_rates import RATES, explain
from duoka.frameworks.torch.plain.arrivals import Arrivals
from duoka.frameworks.torch.plain.share import Share
from duoka.frameworks.torch.plain.weighing import Weighing
from duoka.frameworks.torch.sync_batchnorm import restart_needed


class PlainExchange:
    """The gradients of one strategy's plain loops."""

    def __init__(
        self,
        collective: Collective,
        trained: Trained,
        find_share: Callable[[], Share],
        describe_rates: Callable[[], Sequence[str]],
        name: str = "plain",
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check  # whether a step may be computed here
        self._collective, self._trained, self._name = collective, trained, name
        self._find_share, self._describe_rates = find_share, describe_rates
        self.number = 0  # of exchanges
        self.weighing = Weighing()
        self._is_synced = True
        self._arrivals = Arrivals(find_share, self._finish)
        # By id: a parameter, and its p.grad, if that has weighted gradients of this worker only (no_sync).
        self._pending: dict[int, tuple[Any, torch.Tensor]] = {}

    # Arrivals.

    def watch(self) -> None:
        """Follow the parameters of now."""
        self._trained.scan()
        self._arrivals.watch(self._trained.everything)

    def end(self) -> None:
        """Remove all hooks."""
        self._arrivals.end()

    @property
    def is_taken_only(self) -> bool:
        """Whether torch.autograd.grad came last: its gradients are those of this worker's samples."""
        return self._arrivals.is_taken_only

    def _finish(self, arrived: dict[int, torch.Tensor]) -> None:
        """A backward has ended."""
        self._scan()
        gradients = [arrived.get(id(parameter)) for parameter in self._trained.parameters]
        _refuse_graphs(gradients)
        share, weighed = self._find_share(), self.weighing.read()
        if share.is_counted and not weighed.is_count:
            weighed = weighed.by_samples(share.num_samples)
        factor = share.weight if weighed.factor is None else weighed.factor
        if not share.num_samples:
            factor = 0.0  # a stand-in
        if not self._is_synced:
            self._keep(gradients, factor, is_count=weighed.is_count)
        elif self.has_kept:
            gradients = self._take_kept(gradients, factor, is_count=weighed.is_count)
            self._exchange(gradients, share, 1.0, groups="k")
        else:
            self._exchange(gradients, share, factor, groups="c" if weighed.is_count else "k")

    def _scan(self) -> None:
        """Look at what is trained now: parts of a model may have been frozen since the batch was drawn."""
        before = self._trained.statistics
        self._trained.scan()
        if self._trained.statistics is not before:
            self._trained.statistics.begin_batch()
            self._trained.statistics.watch_still()

    # Accumulation without an exchange: p.grad has this worker's part, and zero_grad drops it as on one device.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the gradients of backwards inside wait for the next exchange."""
        self._is_synced, before = False, self._is_synced
        try:
            yield
        finally:
            self._is_synced = before

    @property
    def has_kept(self) -> bool:
        """Whether gradients wait for an exchange."""
        return any(parameter.grad is kept for parameter, kept in self._pending.values())

    def _find_kept(self, parameter: Any) -> torch.Tensor | None:
        _, kept = self._pending.get(id(parameter), (None, None))
        return kept if parameter.grad is kept else None

    def _keep(self, gradients: Sequence[torch.Tensor | None], factor: float, *, is_count: bool) -> None:
        if is_count:
            raise MismatchError(
                "A loss weighed by a count was backwarded under strategy.no_sync().",
                why="the gradients of several batches are added before the counts of all workers are known.",
                do="call backward outside of no_sync, or train by strategy.backward, where every call is exact.",
            )
        for parameter, gradient in zip(self._trained.parameters, gradients, strict=True):
            if gradient is None:
                continue
            part = _weigh(gradient, factor)
            if (kept := self._find_kept(parameter)) is not None:
                kept.add_(part)
                continue
            if parameter.grad is not None:  # equal on all workers, and added up with theirs
                part = part + _weigh(parameter.grad, 1 / self._collective.num_replicas)
            parameter.grad = part
            self._pending[id(parameter)] = parameter, part

    def _take_kept(
        self, gradients: Sequence[torch.Tensor | None], factor: float, *, is_count: bool
    ) -> list[torch.Tensor | None]:
        if is_count:
            raise MismatchError(
                "A loss weighed by a count ends an accumulation under strategy.no_sync().",
                do="call backward for each batch without no_sync, or train by strategy.backward.",
            )
        totals: list[torch.Tensor | None] = []
        for parameter, gradient in zip(self._trained.parameters, gradients, strict=True):
            total = None if gradient is None else _weigh(gradient, factor)
            if (kept := self._find_kept(parameter)) is not None:
                parameter.grad, total = None, kept if total is None else total + kept
            totals.append(total)
        self._pending = {key: pair for key, pair in self._pending.items() if pair[0].grad is pair[1]}  # frozen since
        return totals

    # The exchange.

    def _exchange(self, gradients: Sequence[torch.Tensor | None], share: Share, factor: float, *, groups: str) -> None:
        self._check()
        self.check_complete()
        title = f"backward {self.number} in {share.title}{RATES}{', '.join(self._describe_rates()) or 'none'}"
        self.number += 1
        is_sent = False
        while not is_sent:
            is_sent = self._send(gradients, share, factor, title, groups)
        self._collective.end_step()

    def check_complete(self) -> None:
        """Raise if a worker was lost: the others do not have its samples, and the loop runs once only."""
        lost = self._collective.num_replicas - len(self._collective.workers)
        if lost:
            raise restart_needed(lost, self._collective.num_replicas)

    def _send(
        self, gradients: Sequence[torch.Tensor | None], share: Share, factor: float, title: str, groups: str
    ) -> bool:
        """Exchange once. Returns False where it has to be repeated, because more buffers travel from now on."""
        trained = self._trained
        statistics, (buffers,) = trained.statistics, trained.buffers(1)
        statistic_buffers = self._make_statistic_buffers()
        exchange = self._collective.exchange([*buffers.buffers, *statistic_buffers], title)
        replica = self._collective.replicas[0]
        used = self._write(exchange, buffers, replica, gradients, factor)
        self._write_statistics(exchange, statistic_buffers, replica, share)
        note = Note(
            groups=groups if share.num_samples or factor else "",
            others=statistics.digest_others() if statistics.others else 0,
            numbers=(0.0, factor) if groups == "c" else (0.0, 0.0),
            moved=tuple(statistics.moved()) if statistics.has_any else (),
            used=used,
            digests=share.digests,
        )
        exchange.deposit(replica, note.pack())
        try:
            if not exchange.commit():
                self.check_complete()
        except MismatchError as error:
            raise explain(error, f"In {share.title}") from None
        notes = Notes(exchange.notes, len(trained.parameters), self.number - 1)
        try:
            notes.compare()
        except MismatchError:
            exchange.release()
            raise
        if notes.moved:
            exchange.release()
            self._collective.end_step()
            trained.move(notes.moved)
            trained.statistics.begin_batch()
            trained.statistics.watch_still()
            return False
        self._take(exchange, buffers, statistic_buffers, notes)
        return True

    def _make_statistic_buffers(self) -> list[Buffer]:
        statistics, found = self._trained.statistics, []
        name = f"{self._name} statistics {self._trained.statistic_layout}"
        if statistics.merged:
            found.append(self._collective.buffer(statistics.num_merged, np.float64, name))
        if statistics.others:
            found.append(self._collective.buffer(statistics.other_bytes, np.uint8, f"{name}, others"))
        return found

    def _write(
        self,
        exchange: Exchange,
        buffers: GradientBuffers,
        replica: int,
        gradients: Sequence[torch.Tensor | None],
        factor: float,
    ) -> np.ndarray | None:
        """Write this worker's gradients. Returns which parameters have one; None: all."""
        if not factor:
            buffers.clear(exchange, replica)
        elif not buffers.write(exchange, replica, gradients, factor):
            return None
        return np.array([gradient is not None for gradient in gradients])

    def _write_statistics(
        self, exchange: Exchange, statistic_buffers: Sequence[Buffer], replica: int, share: Share
    ) -> None:
        statistics = self._trained.statistics
        slots = [torch.as_tensor(exchange.slot(buffer, replica)) for buffer in statistic_buffers]
        if statistics.merged:
            statistics.write_merged(slots[0], share.statistics_weight)
        if statistics.others:
            statistics.write_others(slots[-1]) if replica == 0 else slots[-1].zero_()

    def _take(
        self, exchange: Exchange, buffers: GradientBuffers, statistic_buffers: Sequence[Buffer], notes: Notes
    ) -> None:
        statistics = self._trained.statistics
        sums = buffers.take(exchange, notes.divisors()[0])
        results = [_copy_of(exchange.result(buffer)) for buffer in statistic_buffers]
        exchange.release()
        if statistics.merged:
            statistics.put_merged(results[0])
        if statistics.others:
            statistics.read_others(results[-1])
        with torch.no_grad():
            buffers.show(sums, notes.used)

    # The state of a run.

    def capture(self) -> dict[str, Any]:
        return {"number": self.number}

    def restore(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def _weigh(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """Dense, and new. What a stand-in gave may be NaN, and counts nothing."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense * factor if factor else torch.zeros_like(dense)


def _refuse_graphs(gradients: Sequence[torch.Tensor | None]) -> None:
    if any(gradient is not None and gradient.requires_grad for gradient in gradients):
        raise MismatchError(
            "A backward with create_graph=True reached prepared parameters.",
            why="the mean over the global batch comes from other workers, and has no graph.",
            do="use torch.autograd.grad for the inner gradient, and backward() for the loss; or use one replica.",
        )


def _copy_of(result: Any) -> torch.Tensor:
    return result.clone() if isinstance(result, torch.Tensor) else torch.from_numpy(np.array(result))
