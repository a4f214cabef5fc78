"""Plain style: gradients are exchanged when a backward ends, and `p.grad` is the mean over the global batch.

Hooks of PyTorch's own see each gradient arrive; a callback of the autograd engine runs at the end of the backward. It
exchanges exactly the gradients that have arrived since the last exchange: a second backward, or one nested in another
(reentrant checkpointing), is an exchange of its own. What `p.grad` held before is kept apart, and added to afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from duoka.collectives.collective import Buffer, Collective, Exchange
from duoka.errors import MismatchError
from duoka.frameworks.torch.function.gradient_buffers import GradientBuffers
from duoka.frameworks.torch.function.note import Note, Notes
from duoka.frameworks.torch.function.trained import Trained
from duoka.frameworks.torch.learning_rates import RATES, explain
from duoka.frameworks.torch.plain.share import Share
from duoka.frameworks.torch.plain.weighing import Weighing
from duoka.frameworks.torch.sync_batchnorm import restart_needed

# What DDP, FSDP and activation checkpointing use, too. Taken here, so that a PyTorch without them fails at the import.
_queue = torch.autograd.Variable._execution_engine.queue_callback
_number_of_backward = torch._C._current_graph_task_id


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
        self._watched: Sequence[Any] = ()
        self._handles: list[Any] = []
        self._bases: dict[int, torch.Tensor | None] = {}  # what p.grad was before this backward
        self._arrived: list[int] = []
        self._kept: dict[int, torch.Tensor] = {}  # weighted gradients of backwards under no_sync
        self._tasks: set[int] = set()  # backwards at whose end a callback runs

    # Arrivals.

    def watch(self) -> None:
        """Follow the parameters that are trained now."""
        self._trained.scan()
        if self._watched is self._trained.parameters:
            return
        self.end()
        self._watched = self._trained.parameters
        for index, parameter in enumerate(self._watched):
            self._handles.append(parameter.register_hook(partial(self._begin_arrival, index)))
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._arrive, index)))

    def end(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._watched = [], ()

    def _begin_arrival(self, index: int, gradient: torch.Tensor) -> None:
        task = _number_of_backward()
        if task not in self._tasks:
            self._find_share()  # an error where a backward has no place
            self._tasks.add(task)
            _queue(self._finish)
        if index not in self._bases:
            parameter = self._watched[index]
            self._bases[index], parameter.grad = parameter.grad, None

    def _arrive(self, index: int, parameter: torch.Tensor) -> None:
        self._arrived.append(index)

    def _finish(self) -> None:
        """A backward has ended."""
        gradients = self._take_arrived()
        if all(gradient is None for gradient in gradients):
            return
        share, weighed = self._find_share(), self.weighing.take()
        if share.is_counted and not weighed.is_count:
            weighed = weighed.by_samples(share.num_samples)
        factor = share.weight if weighed.factor is None else weighed.factor
        if not self._is_synced:
            self._keep(gradients, factor, is_count=weighed.is_count)
            return
        has_own = bool(share.num_samples or self._kept)
        if self._kept:
            gradients, factor = self._add_kept(gradients, factor, is_count=weighed.is_count), 1.0
        kind = ("c" if weighed.is_count else "k") if has_own else ""
        self._exchange(gradients, share, factor if has_own else 0.0, kind)

    def _take_arrived(self) -> list[torch.Tensor | None]:
        """This worker's own gradients. `p.grad` is as it was before the backward."""
        arrived, bases = self._arrived, self._bases
        self._arrived, self._bases = [], {}
        self._tasks.clear()
        gradients: list[torch.Tensor | None] = [None] * len(self._watched)
        for index in arrived:
            gradients[index] = self._watched[index].grad
        for index, base in bases.items():
            self._watched[index].grad = base
        if any(gradient is not None and gradient.requires_grad for gradient in gradients):
            raise MismatchError(
                "A backward with create_graph=True reached prepared parameters.",
                why="the mean over the global batch comes from other workers, and has no graph.",
                do="use torch.autograd.grad for the inner gradient, and backward() for the loss; or use one replica.",
            )
        return gradients

    # Accumulation without an exchange.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backwards inside apart until the next exchange."""
        self._is_synced, before = False, self._is_synced
        try:
            yield
        finally:
            self._is_synced = before

    def _keep(self, gradients: Sequence[torch.Tensor | None], factor: float, *, is_count: bool) -> None:
        if is_count:
            raise MismatchError(
                "A loss weighed by a count was backwarded under strategy.no_sync().",
                why="the gradients of several batches are added before the counts of all workers are known.",
                do="call backward outside of no_sync, or train by strategy.backward, where every call is exact.",
            )
        if not self._find_share().num_samples:
            return
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                part = gradient.to_dense() if gradient.is_sparse else gradient
                part = part * factor
                self._kept[index] = self._kept[index].add_(part) if index in self._kept else part

    def _add_kept(
        self, gradients: list[torch.Tensor | None], factor: float, *, is_count: bool
    ) -> list[torch.Tensor | None]:
        if is_count:
            raise MismatchError(
                "A loss weighed by a count ends an accumulation under strategy.no_sync().",
                do="call backward for each batch without no_sync, or train by strategy.backward.",
            )
        kept, self._kept = self._kept, {}
        if not self._find_share().num_samples:
            factor = 0.0
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                part = gradient.to_dense() if gradient.is_sparse else gradient
                total = part * factor if factor else torch.zeros_like(part)
                gradients[index] = total + kept.pop(index) if index in kept else total
        for index, part in kept.items():
            gradients[index] = part
        return gradients

    @property
    def has_kept(self) -> bool:
        """Whether gradients wait for an exchange."""
        return bool(self._kept)

    # The exchange.

    def _exchange(self, gradients: Sequence[torch.Tensor | None], share: Share, factor: float, kind: str) -> None:
        """`kind`: of the weight, as in a note; empty where this worker has no gradient of its own."""
        self._check()
        self.check_complete()
        title = f"backward {self.number} in {share.title}{RATES}{', '.join(self._describe_rates()) or 'none'}"
        self.number += 1
        is_sent = False
        while not is_sent:
            is_sent = self._send(gradients, share, factor, title, kind)
        self._collective.end_step()

    def check_complete(self) -> None:
        """Raise if a worker was lost: the others do not have its samples, and the loop runs once only."""
        lost = self._collective.num_replicas - len(self._collective.workers)
        if lost:
            raise restart_needed(lost, self._collective.num_replicas)

    def _send(
        self, gradients: Sequence[torch.Tensor | None], share: Share, factor: float, title: str, kind: str
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
            groups=kind,
            others=statistics.digest_others() if statistics.others else 0,
            numbers=(0.0, factor if kind == "c" else 0.0),
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


def _copy_of(result: Any) -> torch.Tensor:
    return result.clone() if isinstance(result, torch.Tensor) else torch.from_numpy(np.array(result))
