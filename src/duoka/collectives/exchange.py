"""One step between workers that share memory: deposit, meet, add up, meet; or, when it is small, meet once.

What makes it exactly-once:
- A slot has one writer. After a loss the dead worker's slots get a new one; the dead cannot write any more,
  because the supervisor has reaped it before anybody hears of the loss.
- Sums that a survivor has handed in stay as they are. Only lost replicas are computed again, by their new
  owners, into the slots of the lost.
- A slice that its home has already added up stays: it was made from complete parts. The slices of the
  dead are added up again by whoever now runs their home, from parts that were deposited again.
- A worker with one replica may keep the slice of its home in its own memory (see `kept.py`): nobody else reads that
  part of its slot before the sum. It stays as it is after a loss, too; whoever computes a lost replica again writes
  all of it.
- Slots are not written for the next step before every living worker has said that it took the result,
  so whoever comes late finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from duoka.collectives.answers import Answers
from duoka.collectives.arrays import Array, add
from duoka.collectives.buffers import SharedBuffer
from duoka.collectives.collective import Buffer, Exchange
from duoka.collectives.decision import Regrouped
from duoka.collectives.kept import Kept
from duoka.collectives.meeting import ARRIVED, REDUCED, Meeting
from duoka.collectives.staging import SLOT_BYTES, Staging, check_note
from duoka.collectives.trial import Hearing, Kind, Trial, is_something, kind_of
from duoka.topology.placement import Placement
from duoka.topology.tree import Node, fold, parents

if TYPE_CHECKING:
    from duoka.collectives.shm import SharedMemory

Moment = Callable[[str], None]
Carry = Callable[[int, float], None]  # the number of the call, its deadline in seconds


def tell_difference(own: bytes, theirs: bytes) -> str:
    """The first clause in which two stories differ.

    >>> tell_difference(b"now: backward; learning rates 0.1", b"now: backward; learning rates 0.2")
    "'learning rates 0.1' and not 'learning rates 0.2'"
    """
    mine, others = (text.decode(errors="replace").split("; ") for text in (own, theirs))
    pairs = zip_longest(mine, others, fillvalue="nothing")
    one, other = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    return f"{one[:100]!r} and not {other[:100]!r}"


class CarriedBuffer(Protocol):
    """A buffer in each worker's own memory, whose sums another transport carries between the workers."""

    nbytes: int
    title: str

    def slot(self, replica: int) -> Any: ...

    def add(self, into: Node, other: Node) -> None: ...

    def result(self, homes: Sequence[int]) -> Any: ...


class SharedExchange(Exchange):
    """With `carry`, another transport adds up: between the meetings, and into memory of each worker's own.

    Whoever has completed the call then knows that all others have their result, too, because they said so.
    """

    def __init__(
        self,
        collective: SharedMemory,
        buffers: Sequence[SharedBuffer] | Sequence[CarriedBuffer],
        call: str,
        *,
        can_redo: bool,
        carry: Carry | None = None,
        answers: Answers | None = None,
    ) -> None:
        self._collective = collective
        self._meeting: Meeting = collective.meeting
        self._staging: Staging = collective.staging
        self._moment: Moment = collective.moment
        self._buffers: list[Any] = list(buffers)
        self._carry = carry
        self._answers = answers
        self._call = call
        self._number = 0  # given when it is committed: other calls may come between the deposits
        self._can_redo = can_redo
        self._dealing = collective.dealing
        self._homes = self._dealing.homes
        self._folded: set[int] = set()
        self._kept: dict[int, Kept] = {}
        self._complete: set[Node] = set()
        self._staged: set[Node] = set()
        self._deposited: set[int] = set()
        self._notes: dict[int, bytes] = {}
        self._parents = parents(collective.num_replicas)
        self._small_results: dict[int, Array] = {}
        self._hearing = Hearing(collective.worker, self._find_trial)
        self.is_small = carry is None and sum([buffer.nbytes for buffer in buffers]) <= SLOT_BYTES
        self._is_committed = False
        self._all_notes: list[bytes] = []

    @property
    def missing(self) -> tuple[int, ...]:
        mine = self._dealing.placement.replicas_of(self._collective.worker)
        left = mine if not self._deposited else tuple(sorted({*mine} - self._deposited))
        return left if self._hearing.kind is None else (*left, *self._hearing.awaited)

    def _find_trial(self) -> Trial | None:
        kind = self._hearing.kind
        return None if kind is None else self._dealing.find_trial(kind)

    @property
    def is_begun(self) -> bool:
        return self._number > 0

    def try_newcomer(self, kind: Kind = Kind.STEP) -> None:
        self._hearing.kind = kind
        try:
            self._hearing.begin(self._buffers)
        except MemoryError:
            self._dealing.excuse_witness()

    def is_witnessed(self, replica: int) -> bool:
        return self._hearing.kind is not None and self._hearing.is_witness(replica)

    def slot(self, buffer: Buffer, replica: int) -> Array:
        known = self._known(buffer)
        return known.slot(replica) if self._hearing.kind is None else self._hearing.slot(known, replica)

    def _known(self, buffer: Buffer) -> Any:
        assert buffer in self._buffers, "a buffer of this exchange"
        return buffer

    def own_slice(self, buffer: Buffer, replica: int) -> slice | None:
        """Of a worker with one replica: partial sums of several are made in the slots. A newcomer's are compared."""
        placement = self._dealing.placement
        is_only = placement.replicas_of(self._collective.worker) == (replica,) and replica in self._homes
        if self.is_small or self._carry is not None or self._hearing.kind is not None or not is_only:
            return None
        return self._known(buffer).slice_of(self._homes, replica) if len(placement.partials) > 1 else None

    def keep(self, buffer: Buffer, kept: Kept) -> None:
        """After a loss it stays as it is, like a slot: only lost replicas are computed again, and written wholly."""
        self._kept[id(buffer)] = kept

    def find_kept(self, buffer: Buffer) -> Kept | None:
        return self._kept.get(id(buffer))

    def deposit(self, replica: int, note: bytes = b"") -> None:
        assert replica in self.missing, f"replica {replica} is not awaited here"
        check_note(note)
        self._moment("depositing")
        if self._hearing.kind is not None and self._hearing.concerns(replica):
            self._hearing.testify(self._buffers, replica)
            if self._hearing.is_witness(replica):
                self._moment("witnessed")
                return
        self._deposited.add(replica)
        self._notes[replica] = note
        self._complete_node(Node(replica, replica + 1), self._dealing.placement.share_of(replica).replicas)

    def _complete_node(self, node: Node, within: Sequence[int]) -> None:
        """Mark a subtree as summed; with its sibling it makes the next larger one, within the same share."""
        self._complete.add(node)
        parent = self._parents.get(node)
        if parent is None or not {*within}.issuperset(range(parent.start, parent.stop)):
            return
        left, right = parent.children
        if left in self._complete and right in self._complete:
            for buffer in self._buffers:
                buffer.add(left, right)
            self._complete -= {left, right}
            self._complete_node(parent, within)

    def commit(self, deadline_s: float | None = None) -> bool:
        assert not self.missing, f"replicas {self.missing} have not been deposited"
        deadline_s = self._collective.deadline_s if deadline_s is None else deadline_s
        self._collective.check_usable()
        if not self._number:
            self._number = self._collective.begin(self._call)
        with self._collective.failing_for_good():
            is_committed = self._commit(deadline_s)
        if is_committed and self._answers is not None:
            self._answers.add(self._call, self._list_outcome)
        return is_committed

    def _list_outcome(self) -> list[Array]:
        notes = [np.frombuffer(note, np.uint8) for note in self._all_notes]
        return [*(self.result(buffer) for buffer in self._buffers), *notes]

    def _commit(self, deadline_s: float) -> bool:
        while not self._is_committed:
            try:
                self._attempt(deadline_s)
                self._take(self._dealing.placement)
                self._finish()
            except Regrouped as regrouped:
                before = self._dealing.placement
                self._dealing.adopt(regrouped.decision)
                if regrouped.decision.completed >= self._number:
                    # Somebody completed this step before the loss: its result is there to be taken.
                    self._collective.compare_calls(self._number, before.workers)
                    self._take(before)
                    self._finish()
                elif not self._can_redo:
                    raise self._collective.lost_error(regrouped.decision, self._number) from None
                elif self.missing:
                    return False
        return True

    def _attempt(self, deadline_s: float) -> None:
        if self.is_small:
            self._stage()
        self._write_notes()
        self._moment("arriving")
        self._meeting.meet(self._number, ARRIVED, deadline_s)
        self._moment("arrived")
        self._collective.part_from_odd_calls(self._number, self._dealing.placement.workers, deadline_s)
        self._collective.compare_calls(self._number, self._dealing.placement.workers)
        self._part_from_odd_notes(deadline_s)
        self._part_from_other_bits(deadline_s)
        if not self.is_small:
            if self._carry is None:
                self._reduce()
            else:
                self._carry(self._number, deadline_s)
            self._moment("reduced")
            self._meeting.meet(self._number, REDUCED, deadline_s)

    def _part_from_odd_notes(self, deadline_s: float) -> None:
        if self.common_part is None or not self._meeting.has_anybody_come_back:
            return
        parts: dict[int, set[bytes]] = {}
        for replica in range(self._collective.num_replicas):
            note = self._staging.read_note(self._number, replica)
            parts.setdefault(self._dealing.placement.owner(replica), set()).add(self.common_part(note))
        if odd := self._meeting.ages.find_odd(parts):
            own, *_ = sorted(parts[odd[0]])
            (theirs, *_) = sorted(parts[next(worker for worker in parts if worker not in odd)])
            what = f"did otherwise in its loop body than the others: {tell_difference(own, theirs)}"
            listing = f"{what}\nits: {own.decode(errors='replace')}\ntheirs: {theirs.decode(errors='replace')}"
            self._meeting.part_from(odd, what, listing, deadline_s)

    def _part_from_other_bits(self, deadline_s: float) -> None:
        trial = self._dealing.find_trial()
        told = {} if trial is None else self._staging.read_testimonies(self._number)
        if trial is not None and len({*told.values()}) > 1:
            what = trial.tell_difference(kind_of(told[0]))
            self._meeting.part_from([trial.worker], what, what, deadline_s)

    def _stage(self) -> None:
        """Copy this worker's partial sums to where everybody reads small numbers, each of them once.

        When the call is done again, what was staged still stands there. The slots may not: a worker that had
        come further, and has died since, may have run some of these replicas and written their next step.
        """
        for node in self._complete - self._staged:
            place = self._staging.slot(self._number, node.start)
            start = 0
            for buffer in self._buffers:
                place[start : start + buffer.nbytes].view(buffer.dtype)[:] = buffer.slot(node.start)
                start += buffer.nbytes
            self._staged.add(node)
            self._moment("staging")

    def _write_notes(self) -> None:
        for replica, note in self._notes.items():
            self._staging.write_note(self._number, replica, note)
        if self._hearing.testimony is not None:
            self._staging.write_testimony(self._number, *self._hearing.testimony)

    def _reduce(self) -> None:
        for home in self._homes:
            if home not in self._folded and self._dealing.placement.owner(home) == self._collective.worker:
                for buffer in self._buffers:
                    buffer.reduce_slice(self._dealing.placement, self._homes, home, self._kept.get(id(buffer)))
                self._folded.add(home)
                self._moment("reducing")

    def _take(self, placement: Placement) -> None:
        if self.is_small:
            self._take_small(placement.partials)
        replicas = range(self._collective.num_replicas)
        self._all_notes = [self._staging.read_note(self._number, replica) for replica in replicas]

    def _take_small(self, nodes: tuple[Node, ...]) -> None:
        start = 0
        for position, buffer in enumerate(self._buffers):
            begin, end = start, start + buffer.nbytes
            parts = [self._staging.slot(self._number, n.start)[begin:end].view(buffer.dtype) for n in nodes]
            total = fold(self._collective.num_replicas, nodes, parts, add)
            self._small_results[position] = total if len(nodes) > 1 else total.copy()
            start = end

    def _finish(self) -> None:
        self._is_committed = True
        self._end_trial()
        self._moment("completed")
        self._collective.complete(self._number)
        if not self.is_small and self._carry is None:
            self._collective.hold(self._number)
            for buffer in self._buffers:
                buffer.last_exchange = self._number

    def _end_trial(self) -> None:
        """All come by here, and see the same."""
        if self._dealing.find_trial() is not None:
            of_newcomer = self._staging.read_testimonies(self._number).get(0)
            if of_newcomer is not None and is_something(of_newcomer):
                self._dealing.end_trial(kind_of(of_newcomer))

    def result(self, buffer: Buffer) -> Array:
        assert self._is_committed, "commit() first"
        if self.is_small:
            return self._small_results[self._buffers.index(buffer)]
        return self._known(buffer).result(self._homes)

    def release(self) -> None:
        assert self._is_committed, "commit() first"
        self._collective.release()

    @property
    def notes(self) -> list[bytes]:
        assert self._is_committed, "commit() first"
        return self._all_notes
