"""The first step of a worker that has come back: an older one computes one of its replicas, too, and bits are compared.

Whoever has come back has the state of the run, and not what the script keeps by itself: a counter that anneals a loss,
an averaged teacher. Gradients that depend on that would be others from then on, and nothing else would show it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from duoka.collectives.arrays import Array

NOBODY = -1  # where the number of the witness belongs: it has no memory for that
_SOMETHING, _ZEROS = b"1", b"0"  # before a digest


class Kind(Enum):
    """What is compared, once of each kind."""

    STEP = b"s"
    EVALUATION = b"e"


class _Slots(Protocol):
    dtype: np.dtype[Any]
    count: int

    def slot(self, replica: int) -> Array: ...


@dataclass(frozen=True)
class Trial:
    worker: int  # which has come back
    replica: int  # its first one
    witness: int  # the worker that computes this replica, too, without handing it in

    def tell_difference(self, kind: Kind) -> str:
        what = "computed other gradients" if kind is Kind.STEP else "came to other numbers in strategy.evaluate"
        return (
            f"{what} than worker {self.witness} from the same rows and weights (replica {self.replica}):"
            " they depend on what it was not handed; name that in strategy.also(...)"
        )


class Hearing:
    """What one worker does in one exchange for the trial, if there is one."""

    def __init__(self, worker: int, find_trial: Callable[[], Trial | None]) -> None:
        self._worker = worker
        self._find_trial = find_trial
        self.kind: Kind | None = None
        self._slots: dict[int, Array] = {}
        self.testimony: tuple[int, bytes] | None = None  # 0: of the one that has come back, 1: of the witness

    @property
    def awaited(self) -> tuple[int, ...]:
        """What the witness has still to compute."""
        trial = self._find_trial()
        is_due = trial is not None and trial.witness == self._worker and self.testimony is None
        return (trial.replica,) if trial is not None and is_due else ()

    def is_witness(self, replica: int) -> bool:
        trial = self._find_trial()
        return trial is not None and (trial.witness, trial.replica) == (self._worker, replica)

    def concerns(self, replica: int) -> bool:
        """Whether this worker is one of the two that compute this replica."""
        trial = self._find_trial()
        return trial is not None and trial.replica == replica and self._worker in (trial.worker, trial.witness)

    def begin(self, buffers: Sequence[_Slots]) -> None:
        """Before anything is written. Both begin with zeros: between the arrays of a slot there may be gaps.

        Without memory for the slots of the witness there is no trial.
        """
        trial = self._find_trial()
        for buffer in buffers if trial is not None and self.concerns(trial.replica) else ():
            assert trial is not None
            self.slot(buffer, trial.replica)[:] = 0

    def slot(self, buffer: _Slots, replica: int) -> Array:
        """Where the witness writes is nobody else's."""
        if not self.is_witness(replica):
            return buffer.slot(replica)
        if id(buffer) not in self._slots:
            self._slots[id(buffer)] = np.zeros(buffer.count, buffer.dtype)
        return self._slots[id(buffer)]

    def testify(self, buffers: Sequence[_Slots], replica: int) -> None:
        """Before anything is added to it."""
        slots = [self.slot(buffer, replica) for buffer in buffers]
        assert self.kind is not None
        self.testimony = int(self.is_witness(replica)), self.kind.value + _digest(slots)
        self._slots.clear()


def kind_of(testimony: bytes) -> Kind:
    return Kind(testimony[:1])


def is_something(testimony: bytes) -> bool:
    """Not of a replica without rows, which says nothing about anybody."""
    return testimony[1:2] == _SOMETHING


def _digest(slots: Iterable[Array]) -> bytes:
    sha, is_anything = hashlib.sha256(), False
    for slot in slots:
        sha.update(slot.view(np.uint8).data)
        is_anything = is_anything or bool(slot.any())
    return (_SOMETHING if is_anything else _ZEROS) + sha.digest()
