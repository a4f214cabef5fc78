"""Evaluation: loops in which every worker runs through its own rows, and sums that all of them know afterwards."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from duoka.collectives.collective import Buffer, Collective, Exchange
from duoka.data.seeds import derive
from duoka.data.trail import Trail
from duoka.errors import MismatchError
from duoka.frameworks.torch.blocks import Blocks
from duoka.frameworks.torch.generators import capture_generators, restore_generators
from duoka.frameworks.torch.loader import PreparedLoader
from duoka.frameworks.torch.loop import Loop
from duoka.frameworks.torch.nested import map_tensors
from duoka.frameworks.torch.randomness import seeded
from duoka.frameworks.torch.recollections import Outcome, Recollections
from duoka.frameworks.torch.totals import Metrics, Totals

Function = Callable[[Any], Any]
_LONGEST_TITLE_BYTES = 500  # a note holds 4 KB, and escapes may take six bytes each


class Evaluation:
    """The evaluation loops of one run, and `strategy.evaluate`."""

    def __init__(
        self,
        collective: Collective,
        loop: Loop,
        device: torch.device,
        models: Sequence[nn.Module],
        tell_once: Callable[[str], None],
        trail: Trail,
    ) -> None:
        self._trail = trail
        self._collective = collective
        self._loop = loop
        self._device = device
        self._models = models
        self._tell_once = tell_once
        self._open: set[object] = set()  # evaluation loops under way
        self._generators = ExitStack()  # puts the global generators back
        self._num_loops = 0
        self.replicas_of_last_loop: tuple[int, ...] | None = None
        self._num_evaluations = 0
        self.recollections = Recollections()
        self.refuse_in_function: Callable[[str], None] = lambda call: None  # set where there are such functions

    def capture(self) -> list[int]:
        return [self._num_loops, self._num_evaluations]

    def restore(self, state: Sequence[int]) -> None:
        """What is drawn depends on how many there were before."""
        self._num_loops, self._num_evaluations = state

    # Loops.

    def loop(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches of this worker's replicas, one replica after the other; no loop bodies, nothing to step."""
        self._num_loops += 1
        if len(self._collective.workers) > 1:
            self._tell_once(
                "a loop over a prepared loader without training sees the samples of this worker: its sums and means are"
                " this worker's; use strategy.evaluate(function, loader), or strategy.sum after the loop, or loop over"
                " a loader that is not prepared"
            )
        blocks, number = self._blocks_of(loader), self._num_loops
        return self._run_loop(blocks, number)

    def _run_loop(self, blocks: Blocks, number: int) -> Iterator[Any]:
        self.replicas_of_last_loop = self._collective.replicas
        with self._under_way():
            for replica, batch in blocks.read(self.replicas_of_last_loop, number, self._begin_replica):
                try:
                    yield self._to_device(batch)
                except GeneratorExit:
                    self._collective.work_on(self._loop.step, (replica,), is_left=True)
                    raise
                if self._is_past:
                    break
        self._collective.work_on(self._loop.step, ())

    def _begin_replica(self, replica: int) -> None:
        self._collective.work_on(self._loop.step, (replica,))

    @property
    def _is_past(self) -> bool:
        """A newcomer comes by: the others have evaluated this long ago, and it is told what came of it.

        It is given one batch, so that code which puts batches together finds one.
        """
        joining = self._collective.joining
        return joining is not None and joining.is_newcomer

    @property
    def is_open(self) -> bool:
        """Whether an evaluation loop is under way."""
        return bool(self._open)

    def refuse(self, call: str) -> None:
        """Inside an evaluation loop, or a function of a call, workers cannot wait for one another."""
        self.refuse_in_function(call)
        if self._open:
            raise MismatchError(
                f"{call} was called inside an evaluation loop.",
                why="every worker runs through its own rows there, some through fewer than others:"
                " they would wait for one another.",
                do="collect in a list or add up, and call strategy.gather or strategy.sum after the loop;"
                " or use strategy.evaluate. An iterator that you keep is a loop that has not ended.",
            )

    def forget_open_loops(self) -> None:
        """For the start of another loop: an iterator that somebody has kept is not a loop under way."""
        self.replicas_of_last_loop = None
        if self._open:
            self._open.clear()
            self._generators.close()

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """What is drawn in a loop leaves no trace: outside, all workers go on with the same stream of numbers."""
        if self._collective.num_replicas == 1:
            yield
            return
        mark = object()
        if not self._open:
            self._generators.enter_context(seeded(derive("evaluation", self._loop.seed)))
        self._open.add(mark)
        try:
            yield
        finally:
            self._open.discard(mark)
            if not self._open:
                self._generators.close()

    def _blocks_of(self, loader: DataLoader[Any]) -> Blocks:
        blocks = Blocks(loader, self._collective.num_replicas, self._loop.seed)
        if blocks.is_stream and self._collective.num_replicas > 1:
            what = "an IterableDataset" if isinstance(loader.dataset, IterableDataset) else "batch_size=None"
            self._tell_once(f"{what}: every worker reads all of it, and keeps its share of each batch")
        return blocks

    def _to_device(self, batch: Any) -> Any:
        return map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))

    # strategy.evaluate.

    def evaluate(self, function: Function, loader: Any) -> Any:
        """sum / count over the whole loader, the same bits on every worker and for every number of workers.

        A script on its way to where it was saved is told what came of it then: the weights are those of later.
        """
        self.refuse("strategy.evaluate")
        self._refuse_incomplete_batch()
        blocks = self._blocks_of(_plain(loader))
        self._num_evaluations += 1
        is_after_training = self._loop.body is None and not self._trail.is_at_top
        known = self.recollections.come_by(self._trail.place) if is_after_training else None
        with torch.no_grad(), _in_eval_mode(self._models):
            compute = partial(self._add_up, function, blocks)
            if known is not None and self._loop.is_replaying:
                compute = partial(_recall, known)
            elif is_after_training and self._loop.is_replaying:
                self._tell_once(
                    "strategy.evaluate: what came of it before the run was saved is not known (too many numbers, or the"
                    " script goes another way), and it is done with the weights of the save"
                )
            metrics, flat = _Reduction(
                self._collective, f"evaluate {self._num_evaluations}, {blocks.order}", compute
            ).run()
        if is_after_training and not self._loop.is_replaying:
            self.recollections.keep(Outcome(metrics, flat))
        if self._loop.body is None:
            self._collective.end_step()  # within a body the border comes with the end of the batch
        if metrics is None:
            self._tell_once("strategy.evaluate: the loader gave no batch, so the answer is NaN")
            return math.nan
        answer, empty = metrics.divide(flat)
        for name in empty:
            self._tell_once(f"strategy.evaluate: the count{f' of {name}' if name else ''} is 0, so the answer is NaN")
        return answer

    def _refuse_incomplete_batch(self) -> None:
        if self._loop.body is not None and self._collective.num_replicas > 1 and not self._loop.is_complete:
            raise MismatchError(
                "strategy.evaluate was called in a loop body whose batch is not complete.",
                why="other replicas of this batch are still to come, and workers that run several would wait there.",
                do="call it after optimizer.step() under `if strategy.stepped:`, or after the loop.",
            )

    def _add_up(self, function: Function, blocks: Blocks, replicas: Sequence[int]) -> dict[int, Totals]:
        totals = {replica: Totals() for replica in replicas}
        with self._under_way() if self._collective.num_replicas > 1 else _leaving_no_trace():
            for replica, batch in blocks.read(replicas, -self._num_evaluations, self._begin_replica):
                totals[replica].add(function(self._to_device(batch)))
        return totals


@contextmanager
def _leaving_no_trace() -> Iterator[None]:
    """With one replica, too: a script that is resumed does not compute it again, and draws no numbers for it."""
    state = capture_generators()
    try:
        yield
    finally:
        restore_generators(state)


def _recall(known: Outcome, replicas: Sequence[int]) -> dict[int, Totals]:
    """One replica has all of it: those without rows add nothing."""
    return {replica: Totals() if replica else Totals.of(known.metrics, known.totals) for replica in replicas}


class _Reduction:
    """The totals of all replicas, added up by the tree. Lost replicas are computed again by those who inherit them.

    It takes two exchanges: a replica without rows does not know what is measured before the others have said so.
    """

    def __init__(
        self, collective: Collective, name: str, compute: Callable[[Sequence[int]], dict[int, Totals]]
    ) -> None:
        self._collective = collective
        self._name = name
        self._compute = compute
        self._totals: dict[int, Totals] = {}
        self._seconds = 0.0

    def run(self) -> tuple[Metrics | None, np.ndarray]:
        """What is measured, None if no replica had a row; and all sums and counts."""
        notes = self._exchange([], self._name, self._say_metrics).notes
        measured = {replica: json.loads(note) for replica, note in enumerate(notes) if note}
        _compare(measured)
        if not measured:
            return None, np.empty(0)
        first = min(measured)
        text, numbers = self._collective.scratch(measured[first]["bytes"], np.uint8), None
        if measured[first]["numbers"]:
            numbers = self._collective.scratch(measured[first]["numbers"], np.float64)

        def write(exchange: Exchange, replica: int) -> bytes:
            total = self._totals[replica]
            # One replica writes out what is measured: all say the same.
            exchange.slot(text, replica)[:] = total.describe() if replica == first else 0
            if numbers is not None:
                exchange.slot(numbers, replica)[:] = 0 if total.metrics is None else total.flatten()
            return b""

        buffers = [text] if numbers is None else [text, numbers]
        exchange = self._exchange(buffers, f"{self._name}, totals", write)
        metrics = Metrics.decode(exchange.result(text).tobytes())
        return metrics, np.empty(0) if numbers is None else exchange.result(numbers).copy()

    def _say_metrics(self, exchange: Exchange, replica: int) -> bytes:
        metrics = self._totals[replica].metrics
        if metrics is None:
            return b""
        text = metrics.encode()
        said = {"digest": hashlib.sha256(text).hexdigest(), "bytes": len(text), "numbers": metrics.size}
        title = metrics.title.encode()[:_LONGEST_TITLE_BYTES].decode(errors="ignore")
        return json.dumps({**said, "title": title}).encode()

    def _exchange(self, buffers: Sequence[Buffer], name: str, write: Callable[[Exchange, int], bytes]) -> Exchange:
        exchange = self._collective.exchange(buffers, name)
        while True:
            missing = exchange.missing
            if new := [replica for replica in missing if replica not in self._totals]:
                begin = time.monotonic()
                self._totals |= self._compute(new)
                self._seconds += time.monotonic() - begin
            for replica in missing:
                exchange.deposit(replica, write(exchange, replica))
            # Whoever has a harder block, or a lost one, takes longer by a part of what this worker's own took.
            if exchange.commit(self._collective.deadline_s + 3 * math.ceil(self._seconds)):
                return exchange


def _compare(measured: dict[int, dict[str, Any]]) -> None:
    """All workers see the same notes, so either all of them raise or none."""
    if len({said["digest"] for said in measured.values()}) <= 1:
        return
    listing = "\n".join(f"replica {replica}: {said['title']}" for replica, said in measured.items())
    raise MismatchError(
        "The function given to strategy.evaluate returned different things for different replicas.",
        why=listing,
        do="return the same names, in the same order, and the same shapes for every batch; (0, 0) for nothing.",
    )


def _plain(loader: Any) -> DataLoader[Any]:
    if isinstance(loader, PreparedLoader):
        return loader.unprepared
    if isinstance(loader, DataLoader):
        return loader
    raise MismatchError(
        f"strategy.evaluate cannot split a {type(loader).__name__}.",
        do="give it a DataLoader, prepared or not.",
    )


@contextmanager
def _in_eval_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Every module's flag is put back; layers frozen by hand within a model in training stay frozen."""
    flags = [(module, module.training) for model in models for module in model.modules()]
    in_training = [model for model in models if model.training]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model in in_training:
            model.train()  # before the flags: models may do more than set them
        for module, is_training in flags:
            module.training = is_training
