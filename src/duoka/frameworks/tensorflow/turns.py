"""The host's side of `run`: hands out replicas one after the other, takes in what their steps leave, and exchanges it.

A graph calls in here for every replica, so that the number of them is decided while it runs: after a loss, a worker
computes the lost replicas with the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective, Exchange
from duoka.data.shares import rows_to_compute, share
from duoka.errors import MismatchError
from duoka.frameworks.exchange.memory import Memory
from duoka.frameworks.exchange.note import Note, compare
from duoka.frameworks.exchange.outcome import Outcome, Slices, Total
from duoka.frameworks.exchange.transfer import Transfer, digest_of
from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.tensorflow.randomness import state_of_replica
from duoka.topology.tree import Node, fold

NOBODY = -1  # where the number of a replica belongs: all of them have run


@dataclass(frozen=True)
class Contents:
    """The arrays that one replica's step hands over, in this order; equal for steps that can be exchanged."""

    name: str
    is_training: bool
    can_be_tried: bool  # nothing is exchanged in its middle: it may be computed for comparison only
    is_sparse: tuple[bool, ...]  # gradients: those that are slices are two arrays
    num_moving: int
    num_others: int
    counters: tuple[str, ...]  # the first ones of the others, of which nobody has said that replica 0's count
    num_sums: int
    num_scalars: int
    num_parts: int


class Progress:
    """How far the loop is."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: int | None = None  # of the global batch under way


class Turns:
    def __init__(
        self,
        collective: Collective,
        memory: Memory,
        wire: Wire,
        progress: Progress,
        tell: Callable[[str], None],
        see_run: Callable[[], None],
        see_begin: Callable[[], None],
        see_training: Callable[[], None],
        see_end: Callable[[], None],
    ) -> None:
        self._see_training = see_training  # weights will be changed; before anything is exchanged
        self._see_run = see_run
        self._see_begin = see_begin  # of a run, where all that came before it is done
        self._see_end = see_end  # of each run, before the next one
        self._collective, self._memory, self._progress, self._tell = collective, memory, progress, tell
        self._wire = wire  # for steps that exchange in their middle: it knows the rows
        self._transfers: dict[Any, Transfer] = {}
        self._is_open = False  # a step has been taken by this worker, and its end has not been said
        self._reset(0, 0, [])

    def _reset(self, total_rows: int, data: int, seeds: Sequence[Array]) -> None:
        self._total_rows, self._data = total_rows, data
        self._seeds = [np.array(seed) for seed in seeds]
        self._exchange: Exchange | None = None
        self._transfer: Transfer | None = None
        self._contents: Contents | None = None
        self._total: Total | None = None
        self._parts: dict[int, list[Array]] = {}

    def begin(
        self, total_rows: int, data: int, seeds: Sequence[Array] = (), *, is_at_border: bool = True
    ) -> list[Array]:
        """A global batch: what the first replica needs. `data` is a digest of it, `seeds` the states of generators.

        In the middle of a graph, updates that came before may still be under way: that is no border.
        """
        with nullcontext() if self._collective.joining is None else self._collective.joining.going_on():
            self.end()
        self._see_run()
        if is_at_border:
            self._see_begin()
        if total_rows == 0:
            raise MismatchError("strategy.run was given a batch without rows.", do="leave empty batches out.")
        self._progress.rows = total_rows
        self._wire.begin(
            len(share(total_rows, self._collective.num_replicas, self._collective.replicas[0])), total_rows
        )
        self._reset(total_rows, data, seeds)
        return self._needs_of(self._collective.replicas[0])

    def deposit(self, replica: int, contents: Contents, arrays: Sequence[Array], rate: float) -> list[Array]:
        """What a replica's step has left; gives what the next one needs, once all have run after the exchange."""
        outcome, parts = self._read(replica, contents, arrays)
        num_rows = self._num_rows(replica)
        if self._transfer is None:
            if contents.is_training:
                self._see_training()
            self._contents = contents
            self._transfer = self._transfer_for(outcome, replica, contents)
            kind = "step" if contents.is_training else "run after step"
            name = f"of {kind} {self._progress.step} ({contents.name}), {self._total_rows} rows"
            self._exchange = self._transfer.open(name, is_tried=contents.can_be_tried)
        assert self._exchange is not None
        is_shadow = self._exchange.is_shadow(replica)
        if num_rows:
            self._transfer.write(self._exchange, replica, outcome, num_rows)
            counters = outcome.others[: len(contents.counters)]
            self._exchange.deposit(replica, Note(self._data, rate, digest_of(counters)).pack())
        else:
            self._leave_out(replica)
        if not is_shadow:
            self._parts[replica] = parts if num_rows else [part[:0] for part in parts]
        return self._advance()

    def _advance(self) -> list[Array]:
        assert self._exchange is not None and self._transfer is not None
        while True:
            for replica in self._exchange.missing:
                # Everything but the rows is known by now, and without rows there is nothing to compute.
                if self._num_rows(replica) or (self._contents is not None and self._contents.num_parts):
                    return self._needs_of(replica)
                self._leave_out(replica)
            if self._exchange.commit():
                break
        compare(self._exchange.notes, self._progress.step, self._tell_of_counters)
        self._total = self._transfer.read(self._exchange)
        self._exchange.release()
        return self._needs_of(NOBODY)

    def _tell_of_counters(self, message: str) -> None:
        assert self._contents is not None
        self._tell(
            f"{message}: among {', '.join(self._contents.counters)}. What replicas add is added up in variables with"
            " aggregation=tf.VariableAggregation.SUM"
        )

    def finish(self) -> Result:
        """What all replicas did together."""
        assert self._total is not None and self._contents is not None
        contents, total = self._contents, self._total
        gathered = total.parts(total.flats)[3][contents.num_sums :]
        replicas = sorted(self._parts)
        result = Result(
            total,
            [self._sum_up(values) for values in gathered],
            [
                (np.concatenate(parts), np.array([len(part) for part in parts], np.int32))
                for parts in zip(*(self._parts[replica] for replica in replicas), strict=True)
            ],
            np.array(replicas, np.int32),
            np.array([self._num_rows(replica) for replica in replicas], np.int32),
        )
        self._progress.step += contents.is_training
        self._is_open = True
        return result

    def end(self) -> None:
        """This worker has applied the step: replicas may be dealt anew."""
        if self._is_open:
            self._is_open = False
            self._see_end()
            self._progress.rows = None
            self._collective.end_step()

    def _sum_up(self, values: Array) -> tuple[Array, Array, Array]:
        counts = [self._num_rows(replica) for replica in range(len(values))]
        is_whole = values.dtype.kind not in "fc"
        wide = values.astype(np.float64) if is_whole else values
        weights = [wide.dtype.type(count / self._total_rows) for count in counts]
        weighted = [value * weight for value, weight in zip(wide, weights, strict=True)]
        mean = _add_up(weighted).astype(np.float64 if is_whole else values.dtype)
        return values, _add_up(list(values)), mean

    def _num_rows(self, replica: int) -> int:
        return len(share(self._total_rows, self._collective.num_replicas, replica))

    def _leave_out(self, replica: int) -> None:
        assert self._exchange is not None and self._transfer is not None
        self._transfer.write_nothing(self._exchange, replica)
        self._exchange.deposit(replica)

    def _needs_of(self, replica: int) -> list[Array]:
        """Its number and rows; n / n_r and n; the states of generators that it starts from."""
        num_replicas = self._collective.num_replicas
        self._collective.work_on(self._progress.step, () if replica == NOBODY else (replica,))
        rows = range(0) if replica == NOBODY else rows_to_compute(self._total_rows, num_replicas, replica)
        factor = self._total_rows / max(1, len(rows))
        return [
            np.array([replica, rows.start, rows.stop], np.int64),
            np.array([factor, self._total_rows], np.float64),
            # Copies: TensorFlow may take the memory over as a variable's, and draw from it in place.
            *(np.array(seed if replica == NOBODY else state_of_replica(seed, replica)) for seed in self._seeds),
        ]

    def _read(self, replica: int, contents: Contents, arrays: Sequence[Array]) -> tuple[Outcome, list[Array]]:
        given = iter(arrays)
        gradients = [Slices(next(given), next(given)) if sparse else next(given) for sparse in contents.is_sparse]
        moving = [next(given) for _ in range(contents.num_moving)]
        others = [next(given) for _ in range(contents.num_others)]
        sums = [next(given) for _ in range(contents.num_sums)]
        scalars = [self._in_its_place(next(given), replica) for _ in range(contents.num_scalars)]
        return Outcome(gradients, moving, others, [*sums, *scalars]), list(given)

    def _in_its_place(self, number: Array, replica: int) -> Array:
        """Among those of all replicas, which are nothing but added up."""
        places = np.zeros(self._collective.num_replicas, number.dtype)
        places[replica] = number
        return places

    def _transfer_for(self, outcome: Outcome, replica: int, contents: Contents) -> Transfer:
        num_slices = tuple(len(part.indices) for part in outcome.gradients if isinstance(part, Slices))
        arrays = [*outcome.gradients, *outcome.moving, *outcome.others, *outcome.metrics]
        key = contents, self._total_rows, replica, num_slices, tuple(map(_kind_of, arrays))
        if key not in self._transfers:
            num_rows = len(rows_to_compute(self._total_rows, self._collective.num_replicas, replica))
            self._transfers[key] = Transfer(self._collective, self._memory, outcome, num_rows, self._total_rows)
        return self._transfers[key]


@dataclass(frozen=True)
class Result:
    """What all replicas did together."""

    total: Total
    scalars: list[tuple[Array, Array, Array]]  # of each replica, their sum, their mean weighted by rows
    parts: list[tuple[Array, Array]]  # of this worker's replicas, joined, and their lengths
    replicas: Array  # whose parts these are
    rows: Array  # how many each of them has


def _kind_of(part: Array | Slices) -> tuple[str, tuple[int, ...]]:
    if isinstance(part, Slices):
        return part.values.dtype.str, part.values.shape[1:]
    return part.dtype.str, part.shape


def _add_up(values: Sequence[Any]) -> Any:
    leaves = tuple(Node(index, index + 1) for index in range(len(values)))
    return fold(len(values), leaves, list(values), np.add)
