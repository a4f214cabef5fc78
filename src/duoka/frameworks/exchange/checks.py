"""Replicas stay equal: every so many steps workers compare digests of weights and optimizer state.

A worker that has drifted (a bit that flipped in its memory, code that changed weights there only) is named with the
first tensor that differs, removed and replaced, if more than half of all workers are equal. A junior that differs is
always removed. It happens between two steps, so that from the next one on all compute from the same weights again.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.collectives.decision import Difference
from duoka.collectives.joining import unrecorded
from duoka.errors import ReplicasDiffer
from duoka.events import Checked, Drifted, Parted, emit, is_anybody_listening
from duoka.frameworks.exchange.agreement import gather_rows, hear_all
from duoka.frameworks.exchange.digest import combine, digest_bytes
from duoka.frameworks.structure import raise_difference

_NOTE = struct.Struct("<16s16s")  # digests: of what there is, and of the bits


class State(Protocol):
    """Tensors that all workers must have alike, in an order that is the same everywhere."""

    @property
    def lines(self) -> Sequence[str]:
        """One for each: "name: shape and type"."""
        ...

    def read(self, place: int) -> Array:
        """Its bits, as a flat array of bytes: read only, until the next call."""
        ...


class Checks:
    def __init__(
        self,
        collective: Collective,
        every: int | None,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._collective, self._tell, self._clock = collective, tell, clock
        self._every = every or 0
        self._last_end = clock()
        self._drifted: set[str] = set()  # the first tensors that differed before
        self.agreed_step: int | None = None  # the newest step at whose begin all workers were equal

    def at_border(self, step: int, get_state: Callable[[], State]) -> None:
        """Everything of the steps before is done, on all workers, and nothing of this one has begun."""
        if self._collective.rehearsal is not None:
            self._rehearse(step, get_state)
        if self._every and step % self._every == 0:
            self._look(step, get_state)

    def at_some_border(self, step: int, get_state: Callable[[], State]) -> None:
        """For loops that do not come by at every border: the first one from a due step on counts."""
        self._rehearse(step, get_state)
        if self._every and (self.agreed_step is None or step // self._every > self.agreed_step // self._every):
            self._look(step, get_state)

    def _rehearse(self, step: int, get_state: Callable[[], State]) -> None:
        if self._collective.rehearsal is not None:
            self._collective.rehearsal.at_boundary(step, get_state)

    def _look(self, step: int, get_state: Callable[[], State]) -> None:
        if step == 0:
            self._note_start(get_state)
        elif len(self._collective.workers) > 1 or is_anybody_listening():
            self.check(step, get_state())
        else:
            self.agreed_step = step

    def _note_start(self, get_state: Callable[[], State]) -> None:
        """All workers have just been given the same values."""
        start, self.agreed_step = self._clock(), 0
        state = get_state() if is_anybody_listening() else None
        if state is not None and state.lines:
            self._report(0, combine(_kinds_of(state), _digest(state)), start)

    def check(self, step: int, state: State) -> None:
        """All workers call it. Raises ReplicasDiffer where nobody can say which values are right."""
        start = self._clock()
        kinds, row = _kinds_of(state), _digest(state)
        digest = combine(kinds, row)
        with unrecorded(self._collective.joining):
            while len(self._collective.workers) > 1 and not self._agree(step, state, kinds, digest):
                self._part(step, state, row)
        self._collective.note_agreed()
        self.agreed_step = step
        self._report(step, digest, start)

    def _agree(self, step: int, state: State, kinds: Sequence[str], digest: str) -> bool:
        note = _NOTE.pack(combine(kinds, np.empty(0, np.uint64)).encode(), digest.encode())
        notes = [_NOTE.unpack(each) for each in hear_all(self._collective, note, f"of weights before step {step}")]
        if len({what for what, _ in notes}) > 1:
            raise_difference(state.lines, self._collective, compared=_without_name)
        return len({bits for _, bits in notes}) == 1

    def _report(self, step: int, digest: str, start: float) -> None:
        end = self._clock()
        since, self._last_end = end - self._last_end, end
        emit(Checked(step, digest, round(end - start, 6), round((end - start) / max(since, 1e-9), 6)))

    def _part(self, step: int, state: State, row: Array) -> None:
        """Remove the workers that differ. Raises ReplicasDiffer where nobody can say which these are."""
        rows = gather_rows(self._collective, row, f"of the digests of all tensors before step {step}")
        groups: dict[bytes, list[int]] = {}
        for worker, each in rows.items():
            groups.setdefault(each.tobytes(), []).append(worker)
        if len(groups) == 1:
            return  # the one that differed has been lost meanwhile
        juniors = set(self._collective.juniors)
        of_originals = [group for group in groups.values() if not juniors.issuperset(group)]
        do_juniors_differ = len(of_originals) == 1
        right = of_originals[0] if do_juniors_differ else max(groups.values(), key=len)
        places = _differing(rows, right)
        name = state.lines[places[0]].rpartition(": ")[0]
        if not do_juniors_differ:
            if 2 * len(right) <= len(rows) or name in self._drifted:
                self._give_up(step, name, list(groups.values()), is_again=name in self._drifted)
            self._drifted.add(name)
        odd = [worker for worker in rows if worker not in right]
        what = f"had other values than {_name(right)} before step {step}, first in {name}"
        reason = "weights" if do_juniors_differ else f"weights, first in {name}"
        self._collective.remove(odd, Difference(reason, f"{what} ({len(places)} of {len(row)} tensors)"))
        emit(Drifted(step, tuple(odd), name, len(places)))
        self._tell(
            f"before step {step}, {_name(odd)} had other values than {_name(right)}. {self._since()} Gradients computed"
            " from wrong values since then are in the weights of all workers; start from a checkpoint to undo that"
        )

    def _give_up(self, step: int, name: str, groups: Sequence[Sequence[int]], *, is_again: bool) -> None:
        emit(Parted(step, name))
        listing = "; ".join(_name(group) for group in groups)
        no_majority = f"no group of equal workers has a majority (equal are: {listing})."
        error = ReplicasDiffer(
            f"Before step {step} the replicas are no longer equal: {name} is not the same on workers {groups[0][0]} and"
            f" {groups[1][0]}.",
            why=f"{f'{name} has differed before.' if is_again else no_majority} {self._since()} Memory with a flipped"
            " bit does this, or code that changes weights on some workers only.",
            do=f"start the run again from a checkpoint of step {self.agreed_step or 0} or before: later ones may have"
            " been saved with wrong values. Those of strategy.checkpoint are moved aside, others are for you to move."
            " With three workers or more, a worker that drifts is replaced.",
        )
        error.agreed_step = self.agreed_step or 0
        raise error

    def _since(self) -> str:
        last = "not yet checked" if self.agreed_step is None else f"at step {self.agreed_step}"
        return f"The last check that agreed: {last}."


def _kinds_of(state: State) -> list[str]:
    """Types and shapes. Names may differ: a worker that has made other models before has counted on."""
    return [_without_name(line) for line in state.lines]


def _without_name(line: str) -> str:
    return line.rpartition(": ")[2]


def _digest(state: State) -> Array:
    return np.array([digest_bytes(state.read(place)) for place in range(len(state.lines))], np.uint64)


def _differing(rows: Mapping[int, Array], right: Sequence[int]) -> list[int]:
    """The places at which a worker differs from those that are right."""
    reference = rows[right[0]]
    differs: Any = np.zeros(len(reference), bool)
    for row in rows.values():
        differs |= row != reference
    return [int(place) for place in np.flatnonzero(differs)]


def _name(workers: Sequence[int]) -> str:
    """
    >>> _name([2]), _name([0, 1])
    ('worker 2', 'workers 0, 1')
    """
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
