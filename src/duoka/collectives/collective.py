"""The contract: numbers agreed between workers.

Every call is made by all workers, in the same order. Values belong to *replicas*: a worker that runs
several replicas gives one value for each, in order. Sums follow the summation tree, so the bits of a
result depend on the number of replicas and never on the number of workers. Every call has a deadline
and raises an error that names the worker it waited for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.decision import Difference
from duoka.collectives.kept import Kept
from duoka.topology.placement import Placement

if TYPE_CHECKING:
    from duoka.collectives.joining import Joining

Op = Literal["sum", "mean"]


class Rehearsal(Protocol):
    """Whoever records a rehearsed run; see `runtime/rehearsal/recorder.py`."""

    @property
    def checkpoint_directory(self) -> str:
        """Where this run saves its checkpoints, whatever the script asks for."""
        ...

    def at_boundary(self, step: int, get_state: Callable[[], Any]) -> None:
        """All steps before this one are complete. It may end the script."""
        ...

    def note_returned(self, returned: Any) -> None:
        """`strategy.backward` returns this to the script."""
        ...

    def at_training_boundary(self, step: int, where: str, capture: Callable[[], Any]) -> None:
        """The state of the run can be saved here, and the script may end."""
        ...

    def note_plain(self) -> None:
        """The script trains in a plain loop: one replica per worker, and a restart after a loss."""
        ...

    def load_state(self) -> Any:
        """The state from which this run continues; None if it begins."""
        ...

    def note_resumed(self) -> None:
        """The script has come to where the state was saved."""
        ...


class Buffer(ABC):
    """One flat array per replica, in memory that the collective chose."""

    dtype: np.dtype[Any]
    count: int


class Exchange(ABC):
    """One step's numbers, from the replicas to their sums, exactly once.

    Write each replica of `missing` into its slots, call `deposit`, and then `commit`. When `commit`
    says False, a worker was lost and some of its replicas are now `missing` here: do the same with them.

    `common_part` gives what must be the same in the notes of all replicas. Whoever has come back, and is alone with
    something else there, is taken out of the run before anything is added up.
    """

    common_part: Callable[[bytes], bytes] | None = None

    @property
    @abstractmethod
    def missing(self) -> tuple[int, ...]:
        """The replicas that this worker has still to deposit."""

    @property
    def is_begun(self) -> bool:
        """Whether others may wait in it: it cannot be left out any more."""
        return False

    @abstractmethod
    def slot(self, buffer: Buffer, replica: int) -> Array:
        """Where to write this replica's numbers. Nobody reads it before the deposit."""

    @abstractmethod
    def deposit(self, replica: int, note: bytes = b"") -> None:
        """This replica's slots are written. The note travels along and reaches all workers."""

    def own_slice(self, buffer: Buffer, replica: int) -> slice | None:
        """The part of this replica's slot that only this worker reads, so that it can be kept. None: nothing."""
        return None

    def keep(self, buffer: Buffer, kept: Kept) -> None:
        """Leave these numbers out of the slot. They are added up where they are, and hold the sum afterwards."""
        raise NotImplementedError

    def find_kept(self, buffer: Buffer) -> Kept | None:
        """What this worker has kept."""
        return None

    def compare_juniors(self) -> None:
        """From now on, and before any slot is asked for: a replica of an original worker is `missing` on juniors, too.

        What they write is compared, and only the owner's counts (see `shadow.py`).
        """
        return

    def is_shadow(self, replica: int) -> bool:
        """Whether this worker computes this replica only for comparison."""
        return False

    @abstractmethod
    def commit(self, deadline_s: float | None = None) -> bool:
        """Wait for all, and add up. True: every worker has, or will have, the same sums."""

    def carry_out(self, place: Callable[[int], bytes]) -> None:
        """All of that, losses included: `place` writes a replica into its slots, and gives its note."""
        is_committed = False
        while not is_committed:
            for replica in self.missing:
                self.deposit(replica, place(replica))
            is_committed = self.commit()

    @abstractmethod
    def result(self, buffer: Buffer) -> Array:
        """The sum over all replicas: everybody's memory, to be read only, until this worker's next call."""

    @abstractmethod
    def release(self) -> None:
        """The results have been taken: others may write again. Otherwise this worker's next call says so."""

    @property
    @abstractmethod
    def notes(self) -> list[bytes]:
        """Every replica's note, in order."""


class Collective(ABC):
    worker: int
    num_replicas: int
    deadline_s: float  # of calls that name none
    joining: Joining | None = None  # where lost workers may come back
    rehearsal: Rehearsal | None = None  # in a run of `duoka rehearse`

    @property
    @abstractmethod
    def placement(self) -> Placement:
        """Who runs which replica, now. Changes only between two steps, or through `Exchange.missing`."""

    @property
    def workers(self) -> tuple[int, ...]:
        return self.placement.workers

    @property
    def main(self) -> int:
        """The worker that prints and saves for all: the most senior one."""
        return min(self.workers)

    def ask_main(self, *, is_between: bool) -> bool:
        """The script asks whether this is the main worker. `is_between`: between two steps."""
        return self.worker == self.main

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replicas that this worker runs."""
        return self.placement.replicas_of(self.worker)

    def count_up(self, what: str) -> int:
        """How many of these this worker has made before: for names that are the same on all workers."""
        counts: Counter[str] = self.__dict__.setdefault("_counts", Counter())
        counts[what] += 1
        return counts[what] - 1

    def count(self, what: str) -> int:
        """How many of these this worker has made so far."""
        counts: Counter[str] = self.__dict__.get("_counts", Counter())
        return counts[what]

    @property
    def compares_juniors(self) -> bool:
        """Whether juniors compute a replica of an original worker in the next step, for comparison."""
        return False

    @property
    def shadows(self) -> tuple[int, ...]:
        """The replicas that this worker computes in this step for comparison only."""
        return ()

    def note_agreed(self) -> None:
        """Weights have been compared, and are equal: juniors that compute the same in the next step are promoted."""
        return

    @abstractmethod
    def remove(self, workers: Sequence[int], difference: Difference) -> None:
        """Have these workers removed, as after a loss. All workers call it between two calls; it returns after that."""

    def yield_if_junior(self, difference: Difference) -> None:
        """This worker alone differs, as far as it knows: a junior does not return from here."""
        return

    @property
    def juniors(self) -> tuple[int, ...]:
        """Replacement workers that have not agreed with the others at a comparison yet."""
        return ()

    @property
    @abstractmethod
    def own_replicas(self) -> tuple[int, ...]:
        """Those for which this worker can speak in the next call: without what it has inherited since the last one."""

    @abstractmethod
    def buffer(self, count: int, dtype: Any, name: str = "") -> Buffer:
        """Memory for `exchange`, handed out once and used for every step.

        Whoever asks with a name, and the same count and type, is given the same memory again. That is how a worker that
        joins later, and has not made what others made and no longer use, comes to the memory in use.
        """

    @abstractmethod
    def scratch(self, count: int, dtype: Any) -> Buffer:
        """Memory for the next exchange, shared with other sizes: for numbers whose size changes."""

    @abstractmethod
    def common(self, nbytes: int) -> Array:
        """Bytes that all workers see, handed out once. Who writes them, and when, is agreed upon by other calls."""

    @property
    @abstractmethod
    def next_number(self) -> int:
        """Of the next call: the same on all workers that have made the same ones."""

    @abstractmethod
    def await_main(self, is_done: Callable[[], bool]) -> bool:
        """Wait for what the main worker does alone. False: this worker is the main one, or has become it.

        True as well when the main worker has gone on to its next call, or has ended, without doing it.
        """

    @abstractmethod
    def exchange(self, buffers: Sequence[Buffer], name: str = "", deadline_s: float | None = None) -> Exchange:
        """Begin a step. Waits until everybody has taken the last result out of these buffers.

        The name is compared between workers when it is committed.
        """

    @abstractmethod
    def work_on(self, step: int, replicas: Sequence[int], *, is_left: bool = False) -> None:
        """Say which replicas of which step of the user's this worker computes from now on; none after `end_step`.

        An error, or what ended a worker, can then be told with its replica and step. `is_left`: a loop was left in
        their middle, by an error or to do something else, which may take its time.
        """

    @abstractmethod
    def end_step(self) -> None:
        """A step border: all workers have committed the same step. After a loss, replicas are dealt anew here."""

    @abstractmethod
    def all_reduce(
        self,
        values: Sequence[Any],
        op: Op = "sum",
        *,
        weights: Sequence[float] | None = None,
        out: Any = None,
        deadline_s: float | None = None,
    ) -> Array:
        """The sum, or the mean weighted by `weights`, over all replicas' values, in tree order.

        A value of weight zero is left out. The mean divides once, by the sum of all weights.
        """

    @abstractmethod
    def all_gather(self, values: Sequence[Any], *, deadline_s: float | None = None) -> list[Array]:
        """Every replica's value, in the order of replicas; sizes and types may differ."""

    @abstractmethod
    def broadcast(self, value: Any = None, *, root: int = 0, deadline_s: float | None = None) -> Array:
        """The value given by the worker that runs replica `root`; others may leave theirs out."""

    @abstractmethod
    def barrier(self, *, deadline_s: float | None = None) -> None:
        """Return when all workers have called it."""
