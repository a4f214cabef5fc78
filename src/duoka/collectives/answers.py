"""Calls between steps: members of a run write down what came of them, a newcomer is answered with that."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.chronicle import Chronicle, Record
from duoka.collectives.collective import Buffer, Exchange
from duoka.errors import CannotJoin

T = TypeVar("T")
Pack = Callable[[T], Sequence[Array]]
Unpack = Callable[[list[Array]], T]
_MARK = "mark "


class Answers:
    """Where this worker is among the calls that are written down: all of them make the same ones, in the same order.

    Calls within steps are not among them. A newcomer runs no step that others have run; it gets what came of all of
    them when it joins.
    """

    def __init__(self, chronicle: Chronicle, wait: Callable[[], None], *, is_replaying: bool) -> None:
        self._chronicle = chronicle
        self._wait = wait  # for a newcomer that is ahead of what is written down
        self.is_replaying = is_replaying
        self.is_in_step = False
        self.num_passed = 0  # records that this worker has added, found or been answered with
        self._is_paused = False
        self._ahead: deque[Record] = deque()

    @property
    def is_recording(self) -> bool:
        return not (self.is_in_step or self._is_paused)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """What is called inside leaves no record, and a newcomer does not call it."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def pause(self) -> None:
        self._is_paused = True

    def answer(self, name: str, call: Callable[[], T], pack: Pack[T], unpack: Unpack[T]) -> T:
        """Make this call and write down what came of it; or, in a newcomer, give what came of it then."""
        if not self.is_recording:
            return call()
        if self.is_replaying:
            return unpack(self.take(name))
        result = call()
        self.add(name, lambda: pack(result))
        return result

    def add(self, name: str, answer: Callable[[], Sequence[Array]]) -> None:
        self._chronicle.add(self.num_passed, name, answer)
        self.num_passed += 1

    def take(self, name: str) -> list[Array]:
        """What came of the next call, which must be this one. Waits for the others to make it."""
        record = self._next()
        if record.name != name:
            raise _does_not_fit(f"it calls {name!r}, where the others called {record.name!r}")
        self.num_passed += 1
        return record.answer

    def _next(self) -> Record:
        while not self.has_more():
            if self._chronicle.is_closed:
                raise CannotJoin(
                    "What came of the calls before this one is not known any more.",
                    why="the list of answers for newcomers was full, or closed by something that cannot be answered.",
                )
            self._wait()
        return self._ahead.popleft() if self._ahead else self._chronicle.read_next()

    def has_more(self) -> bool:
        """Whether the others are further than this newcomer."""
        return bool(self._ahead) or self._chronicle.length > self.num_passed

    # Marks: no calls, but places of the script that all workers come by.

    def mark(self, place: str, facts: dict[str, Any]) -> None:
        """Say that this worker has come by this place."""
        if self.is_recording and not self.is_replaying:
            self.add(_MARK + place, lambda: [np.frombuffer(json.dumps(facts).encode(), np.uint8)])

    def take_mark(self, place: str) -> dict[str, Any]:
        """The facts of the next mark of this place; other marks may come before it, calls may not."""
        passed: list[Record] = []
        while True:
            record = self._next()
            if record.name == _MARK + place:
                break
            passed.append(record)
            self.num_passed += 1  # what was read counts while more is waited for
            if not record.name.startswith(_MARK):
                raise _does_not_fit(f"it comes by {place!r}, where the others called {record.name!r}")
        self._ahead.extendleft(reversed(passed))
        self.num_passed += 1 - len(passed)
        return _read_facts(record)

    def jump_to_last(self, place: str) -> dict[str, Any] | None:
        """Leave out everything up to the last mark of this place, and give its facts; None if there is none."""
        read: list[Record] = []
        while self.has_more():
            read.append(self._next())
            self.num_passed += 1
        found = max((at for at, record in enumerate(read) if record.name == _MARK + place), default=-1)
        self._ahead.extend(read[found + 1 :])
        self.num_passed -= len(read) - found - 1
        return None if found < 0 else _read_facts(read[found])

    def close(self) -> None:
        """From now on nothing is written down: nobody can join any more."""
        self._chronicle.close()
        self.pause()


class Replayed(Exchange):
    """An exchange of long ago, as a newcomer sees it: nothing is missing, and everything is there."""

    missing: tuple[int, ...] = ()

    def __init__(self, answers: Answers, call: str, buffers: Sequence[Buffer]) -> None:
        self._answers = answers
        self._call = call
        self._buffers = list(buffers)
        self._answer: list[Array] = []

    def slot(self, buffer: Buffer, replica: int) -> Array:
        raise AssertionError("nothing is missing here")

    def deposit(self, replica: int, note: bytes = b"") -> None:
        raise AssertionError("nothing is missing here")

    def commit(self, deadline_s: float | None = None) -> bool:
        self._answer = self._answers.take(self._call)
        return True

    def result(self, buffer: Buffer) -> Array:
        return self._answer[self._buffers.index(buffer)]

    def release(self) -> None:
        pass

    @property
    def notes(self) -> list[bytes]:
        return [note.tobytes() for note in self._answer[len(self._buffers) :]]


def _read_facts(record: Record) -> dict[str, Any]:
    facts = json.loads(record.answer[0].tobytes())
    assert isinstance(facts, dict)
    return facts


def _does_not_fit(how: str) -> CannotJoin:
    return CannotJoin(
        f"The script does not do the same a second time: {how}.",
        why="a worker in the place of a lost one runs the script from its top, and comes by the calls of the others.",
        do="let what is called before and between loops not depend on time, on files that change, or on is_main.",
    )
