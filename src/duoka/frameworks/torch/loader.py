"""A DataLoader whose `batch_size` is global: it gives this worker's replicas their rows, one body after the other."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from duoka.collectives.collective import Collective
from duoka.data.ending import Ending
from duoka.data.position import LEFT_OUT, Passes
from duoka.data.seeds import derive
from duoka.errors import MismatchError
from duoka.frameworks.torch.cycles import Cycles, Place, find_caller
from duoka.frameworks.torch.finished import Finished
from duoka.frameworks.torch.loader_processes import start
from duoka.frameworks.torch.loop import Body, Loop
from duoka.frameworks.torch.nested import count_rows, map_tensors, take_rows
from duoka.frameworks.torch.order import digest, has_own_sampler, list_batches, seeded_order
from duoka.frameworks.torch.randomness import seeded
from duoka.frameworks.torch.single_samples import count_last_batch
from duoka.frameworks.torch.source import Source, Unit, rows_of

if TYPE_CHECKING:
    from duoka.frameworks.torch.evaluation import Evaluation

Load = Callable[[Unit], Any]
_END = object()


class Hooks(Protocol):
    """What a loader tells about the loop, and asks of it."""

    def choose_plain(self) -> None:
        """A plain loop begins: it may be the first one, or one that does not fit to the rest of the script."""
        ...

    def is_evaluating(self) -> bool: ...

    @property
    def evaluation(self) -> Evaluation: ...

    def begin_loop(self) -> None: ...

    def begin_pass(self, loader: PreparedLoader) -> None: ...

    def end_pass(self, loader: PreparedLoader) -> None: ...

    def begin_step(self) -> None:
        """Everything of the batches before is done, and of the next one nothing has begun."""
        ...

    def begin_batch(self, num_rows: int, is_last: bool) -> None: ...

    def begin_body(self, unit: Unit, is_first: bool) -> None: ...

    def end_body(self, body: Body) -> None: ...

    def end_batch(self) -> None: ...

    def leave_batch(self, body: Body) -> None: ...

    def end_loop(self) -> None: ...

    def lose(self, why: str, do: str = "") -> None:
        """It is not known any more where the loop is."""
        ...

    @property
    def is_saved(self) -> bool:
        """Whether it matters where the loop is."""
        ...

    def tell_once(self, text: str) -> None: ...


class PreparedLoader(Ending):
    """Stands in for the user's loader; whatever else is asked of it goes to that one."""

    def __init__(
        self,
        loader: DataLoader[Any],
        collective: Collective,
        loop: Loop,
        device: torch.device,
        hooks: Hooks,
    ) -> None:
        self._loader = loader
        self._collective = collective
        self._loop = loop
        self._device = device
        self._hooks = hooks
        self.passes = Passes()
        self.batches_before = 0  # of the pass under way, given out before this process came to it
        self._is_leading = False  # a body of the loop over it is under way
        self._cycles = Cycles()
        self.is_stream = isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None
        self._source = None if self.is_stream else Source(loader, loop.seed, collective.num_replicas, self._units)

    def __len__(self) -> int:
        """Global batches."""
        return len(self._loader)

    @property
    def items_per_batch(self) -> int:
        """How often an evaluation loop comes by on this worker for one global batch; strategy.progress counts by it."""
        return len(self._collective.replicas)

    def __getattr__(self, name: str) -> Any:
        if "_loader" not in self.__dict__:
            raise AttributeError(name)  # asked by copy and pickle, before anything is there
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        self.batches_before = 0
        self._hooks.choose_plain()
        if self._hooks.is_evaluating():
            return self._evaluate()
        self._check_batch_size()
        self._leave_kept()
        self._hooks.begin_loop()
        self._hooks.begin_pass(self)
        first = self.passes.begin(is_inner=self._loop.body is not None and not self._is_leading)
        self.batches_before = first or 0
        if first is None:
            if self._hooks.is_saved:
                self._hooks.tell_once(LEFT_OUT)
            self._hooks.end_pass(self)
            return Finished(self.passes, self._leave_out_finished)
        walk = self._walk(first, self.passes.number, find_caller())
        self._walking = weakref.ref(walk)
        return walk

    def _leave_out_finished(self) -> Iterator[Any]:
        """The pass under way, in place of one that is over."""
        self._hooks.tell_once(
            "the script begins passes over a loader in `except StopIteration`, and those that are over are left out at"
            " once: what it counts there, it counts once; count with strategy.step"
        )
        batches = iter(self)
        while isinstance(batches, Finished):
            batches = iter(self)
        return batches

    def _leave_kept(self) -> None:
        """The pass before this one has ended, though its iterator is still there: in a variable, in a zip()."""
        if self._is_leading:
            self._hooks.lose("a loop over a loader begins while the last batch of another one over it is under way")
        else:
            self._end(self.passes.number)

    def _walk(self, first: int, number: int, place: Place) -> Iterator[Any]:
        try:
            yield from self._run(self._stream(first) if self.is_stream else self._indexed(first), first, number)
            self._refuse_cycle(number, place)
        finally:
            if not self._is_ending():
                self._end(number)

    def _refuse_cycle(self, number: int, place: Place) -> None:
        """A pass is asked for more than it has. What a cycle gives from here on, no position tells of."""
        if self._hooks.is_saved and number == self.passes.number and self._cycles.hold(self._walking(), place):
            self._hooks.lose(
                "itertools.cycle keeps the batches of a pass over a loader, and gives them again by itself",
                "draw from a generator instead: `def endless(loader): while True: yield from loader`.",
            )

    def _end(self, number: int) -> None:
        if self.passes.is_open and number == self.passes.number:
            self.passes.end()
            if self._source is not None:
                self._source.end()
            self._hooks.end_pass(self)

    def _check_batch_size(self) -> None:
        size = self._loader.batch_size
        if size is not None and size < self._collective.num_replicas:
            raise MismatchError(
                f"A batch of {size} rows cannot be split between {self._collective.num_replicas} replicas.",
                why="batch_size is global: every replica takes its share of each batch.",
                do=f"use batch_size={self._collective.num_replicas} or more, or fewer replicas.",
            )

    def _indexed(self, first: int) -> Iterator[tuple[int, Load]]:
        """The rows of each global batch, and how to load a body's part of them."""
        assert self._source is not None
        number = self.passes.number
        batches = self._list_batches()
        self._loop.order = self.passes.order = digest(batches)
        self._loop.last_rows = count_last_batch(self._loader)
        self._check_order(batches)
        self._source.begin(batches, number)
        for position in range(first, len(batches)):
            yield len(batches[position]), partial(self._source.load, position)

    def _list_batches(self) -> list[list[Any]]:
        if self.passes.is_resumed and has_own_sampler(self._loader):
            for before in range(self.passes.number):
                list_batches(self._loader, self._loop.seed, before)  # it may count its passes, or remember them
        return list_batches(self._loader, self._loop.seed, self.passes.number)

    def _check_order(self, batches: list[list[Any]]) -> None:
        expected = self.passes.expected_order()
        if expected not in ("", self.passes.order):
            raise MismatchError(
                f"Pass {self.passes.number + 1} over a loader has another order than in the run that is resumed.",
                why=f"{len(batches)} batches, fingerprint {self.passes.order}; it was {expected}.",
                do="use the dataset, the batch size and the sampler of that run, or begin a new one.",
            )

    def _stream(self, first: int) -> Iterator[tuple[int, Load]]:
        """Every worker reads everything and keeps its share."""
        if self._collective.num_replicas > 1:
            what = "an IterableDataset" if isinstance(self._loader.dataset, IterableDataset) else "batch_size=None"
            self._hooks.tell_once(f"{what}: every worker reads all of it, and keeps its share of each batch")
        if first:
            self._hooks.tell_once(f"a stream is read from its beginning: {first} batches are skipped")
        self._loop.last_rows = 0
        number = self.passes.number
        with seeded_order(self._loader, self._loop.seed, number):
            batches = start(self._loader)
        for position in itertools.count():
            # A stream of its own for every batch: it may be read within the body of a loader that leads.
            with seeded(derive("stream", self._loop.seed, number, position)):
                batch = next(batches, _END)
            if batch is _END:
                return
            if position < first:
                continue
            rows = count_rows(batch)
            if not rows:
                raise MismatchError(
                    f"A batch has no rows that could be split: it is a {type(batch).__name__}.",
                    do="let the loader give tensors whose first dimension is the rows.",
                )
            yield rows, partial(self._cut, batch, rows)

    def _cut(self, batch: Any, num_rows: int, unit: Unit) -> Any:
        rows, _ = rows_of(num_rows, self._collective.num_replicas, unit)
        return take_rows(batch, range(rows[0], rows[-1] + 1))

    def _units(self) -> list[Unit]:
        """The bodies of one batch on this worker."""
        replicas = self._collective.replicas
        if self._loop.runs_whole_shares:
            return [replicas]
        return [(replica,) for replica in (*replicas, *self._witnessed)]

    @property
    def _witnessed(self) -> tuple[int, ...]:
        """What is computed for comparison only, with a worker that has just come back."""
        return self._collective.shadows if self._loop.can_be_tried else ()

    def _mark(self, unit: Unit) -> set[tuple[int, bool]]:
        """Its replicas, and whether they are this worker's own."""
        return {(replica, replica in self._collective.replicas) for replica in unit}

    def _run(self, batches: Iterable[tuple[int, Load]], first: int, number: int) -> Iterator[Any]:
        """Lead the loop; or, where another loader leads it already, follow its replicas."""
        if self._loop.body is None:
            self._loop.first_batch = first
        reader = _OneAhead(batches)
        followed = _Followed()
        while (current := reader.current) is not None:
            if number != self.passes.number:
                self._hooks.lose("two iterators over one loader are drawn from in turns")
            leader = self._loop.body
            if leader is None and followed.ends():
                reader.advance()
            elif leader is None or not self._loop.is_managed:
                num_rows, load = current
                yield from self._bodies(num_rows, load, reader.is_last)
                reader.advance()
            elif followed.is_next_batch(leader, self._loop.batch):
                reader.advance()
            else:
                if followed.is_first_answer(self._loop.batch):
                    self.passes.give()
                yield self._to_device(current[1](leader.replicas))
        if self._loop.body is None:
            self._hooks.end_loop()

    def _bodies(self, num_rows: int, load: Load, is_last: bool) -> Iterator[Any]:
        """One global batch: a body for each replica of this worker, and for those it inherits."""
        if self._loop.body is None:
            self._hooks.begin_step()
        self._hooks.begin_batch(num_rows, is_last)
        self.passes.give()
        done: set[tuple[int, bool]] = set()  # what was computed for comparison only may be inherited later
        is_first = True
        while remaining := [unit for unit in self._units() if not done.issuperset(self._mark(unit))]:
            unit = remaining[0]
            mark = self._mark(unit)
            _, rows = rows_of(num_rows, self._collective.num_replicas, unit)
            self._collective.work_on(self._loop.step, unit)
            batch = self._to_device(load(unit))
            self._hooks.begin_body(unit, is_first)
            is_first = False
            with self._lead(), self._loop.run_body(unit, rows, num_rows) as body:
                try:
                    yield batch
                except GeneratorExit:
                    if self._is_ending():
                        raise
                    step = self._loop.step
                    self._hooks.leave_batch(body)
                    # Mostly an error has left the loop, and it will be reported.
                    self._collective.work_on(step, unit, is_left=True)
                    raise
                self._hooks.end_body(body)
            if self._loop.is_complete:
                break  # replicas inherited since then took part already: they were lost after the exchange
            if not body.is_discarded:
                done.update(mark)
        self._hooks.end_batch()

    @contextmanager
    def _lead(self) -> Iterator[None]:
        was_leading, self._is_leading = self._is_leading, True
        self.passes.lead()
        try:
            yield
        finally:
            self._is_leading = was_leading

    def _to_device(self, batch: Any) -> Any:
        return map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))

    def _evaluate(self) -> Iterator[Any]:
        return self._hooks.evaluation.loop(self._loader)

    @property
    def unprepared(self) -> DataLoader[Any]:
        """The user's own loader."""
        return self._loader


class _OneAhead:
    """Knows which item is the last one."""

    def __init__(self, items: Iterable[tuple[int, Load]]) -> None:
        self._items = iter(items)
        self.current = next(self._items, None)
        self._following = next(self._items, None)

    @property
    def is_last(self) -> bool:
        return self._following is None

    def advance(self) -> None:
        self.current, self._following = self._following, next(self._items, None)


class _Followed:
    """Which batch of the leading loader was answered last."""

    def __init__(self) -> None:
        self._batch: int | None = None
        self._body: Body | None = None
        self._answered: int | None = None

    def ends(self) -> bool:
        """True once when the leader is gone: the batch that was followed last is done."""
        was_following, self._batch = self._batch is not None, None
        return was_following

    def is_first_answer(self, batch: int) -> bool:
        """True once for each batch of the leader."""
        answered, self._answered = self._answered, batch
        return answered != batch

    def is_next_batch(self, leader: Body, batch: int) -> bool:
        """True when the leader has gone on: then its follower goes on too."""
        if leader is self._body:
            raise MismatchError(
                "A loop over a prepared loader asked for a second batch within one body of another such loop.",
                why="the outer loader decides which replica runs; it cannot wait for an inner loop of training.",
                do="walk both in step with zip(), or leave the inner loader unprepared.",
            )
        has_advanced = self._batch is not None and batch != self._batch
        self._batch = batch
        if not has_advanced:
            self._body = leader
        return has_advanced
