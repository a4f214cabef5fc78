"""A replica's note: what travels beside its gradients, and what everybody concludes from all notes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from duoka.errors import MismatchError, ReplicaFailed

_HEAD = struct.Struct("<??BBIIIIIHHHHH")
_LONGEST_ERROR = 1500
_DTYPES = ("float32", "float64", "float16", "bfloat16")


class Digests(NamedTuple):
    """What must be alike on all workers when a call begins. 0: nothing was looked at."""

    generators: int = 0  # the global generators
    inputs: int = 0  # the values of global tensors
    samples: int = 0  # some samples of each loader
    order: int = 0  # which samples make up the batch


NO_DIGESTS = Digests()


class Note(NamedTuple):
    """One replica's. A replica without samples has no kinds, no numbers and no groups."""

    is_nan: bool = False
    is_large: bool = False  # its metrics do not fit here, and follow in an exchange of their own
    dtype: str = "float32"  # of the loss
    groups: str = ""  # of loss terms: "k" for one whose weight is known, "c" for a count
    digests: Digests = NO_DIGESTS
    others: int = 0  # a digest of buffers of which replica 0's count
    error: str = ""
    numbers: tuple[float, ...] = ()  # for each group of terms: the sum, and the count
    metrics: bytes = b""
    moved: tuple[int, ...] = ()  # buffers that it changed, and that do not travel yet
    used: np.ndarray | None = None  # which parameters got a gradient; None: all, or none for want of samples

    def pack(self) -> bytes:
        error = self.error.encode(errors="replace")[:_LONGEST_ERROR]
        groups, numbers = self.groups.encode(), struct.pack(f"<{len(self.numbers)}d", *self.numbers)
        moved = struct.pack(f"<{len(self.moved)}H", *self.moved)
        bits = b"" if self.used is None or self.used.all() else np.packbits(self.used).tobytes()
        head = _HEAD.pack(
            self.is_nan, self.is_large, _DTYPES.index(self.dtype), 0, *self.digests, self.others,
            len(error), len(groups), len(self.numbers), len(self.metrics), len(moved),
        )  # fmt: skip
        return b"".join((head, error, groups, numbers, self.metrics, moved, bits))

    @classmethod
    def unpack(cls, data: bytes, num_parameters: int) -> Note:
        is_nan, is_large, dtype, _, generators, inputs, samples, order, others, *lengths = _HEAD.unpack_from(data)
        lengths[2] *= 8
        places, start = [], _HEAD.size
        for length in lengths:
            places.append(data[start : start + length])
            start += length
        error, groups, numbers, metrics, moved = places
        used = None
        if bits := data[start:]:
            used = np.unpackbits(np.frombuffer(bits, np.uint8), count=num_parameters).astype(bool)
        return cls(
            is_nan,
            is_large,
            _DTYPES[dtype],
            groups.decode(),
            Digests(generators, inputs, samples, order),
            others,
            error.decode(errors="replace"),
            struct.unpack(f"<{len(numbers) // 8}d", numbers),
            metrics,
            struct.unpack(f"<{len(moved) // 2}H", moved),
            used,
        )


def read_digests(packed: bytes) -> bytes:
    """Out of a packed note: what must be the same on all workers."""
    return repr(Digests(*_HEAD.unpack_from(packed)[4:8])).encode()


def order_differs(what: str) -> MismatchError:
    return MismatchError(
        what,
        why="every worker runs the loader's sampler and must come to the same order. Each replica takes a part of it.",
        do="leave DistributedSampler out, because Duoka splits the batches itself. Seed a sampler's own generator alike"
        " on all workers.",
    )


class Notes:
    """All replicas' notes of one call. All workers see the same ones, so either all of them raise or none."""

    def __init__(self, packed: Sequence[bytes], num_parameters: int, number: int) -> None:
        self.all = [Note.unpack(data, num_parameters) for data in packed]
        self._num_parameters, self._number = num_parameters, number
        self.with_samples: list[Note] = []
        moved: set[int] = set()
        self.nan: int | None = None  # the first replica with a loss that is NaN
        self.are_metrics_large = False
        for replica, note in enumerate(self.all):
            if note.error:
                raise ReplicaFailed(
                    f"The function of replica {replica} raised at call {number}: {note.error.splitlines()[0]}",
                    why=note.error,
                    do="see its traceback, from the worker that runs it. A script that catches the error continues.",
                )
            if note.groups:
                self.with_samples.append(note)
            if note.is_nan and self.nan is None:
                self.nan = replica
            self.are_metrics_large |= note.is_large
            moved.update(note.moved)
        self.moved = sorted(moved)
        first = self.with_samples[0]
        self.groups, self.dtype = first.groups, first.dtype
        self.has_metrics = bool(first.metrics) or first.is_large
        for note in self.with_samples:
            if (bool(note.metrics) or note.is_large) != self.has_metrics:
                raise MismatchError(
                    f"At call {number} the function returned metrics on some replicas only.",
                    do="return the same names and shapes for every batch; (0, 0) where there is nothing to count.",
                )

    def compare(self) -> None:
        """Raise where workers have parted."""
        for note in self.all:
            if note.digests != self.all[0].digests:
                self._raise_difference()
            if note.groups not in ("", self.groups):
                raise MismatchError(
                    f"At call {self._number} the function weighed its loss differently on different replicas.",
                    why=self._list([note.groups for note in self.all]),
                    do="call strategy.weigh alike on every replica, even if a count is zero.",
                )

    def _raise_difference(self) -> NoReturn:
        generators, inputs, samples, _ = ([note.digests[place] for note in self.all] for place in range(4))
        if len(set(generators)) > 1:
            raise MismatchError(
                f"The workers have drawn different random numbers between calls {self._number - 1} and {self._number}.",
                why="code outside of the function runs on every worker, and must draw the same numbers everywhere:\n"
                + self._list(generators),
                do="draw inside the function, or seed by the step; leave nothing that draws under"
                " `if strategy.is_main`.",
            )
        if len(set(inputs)) > 1:
            raise MismatchError(
                f"The global tensors given to strategy.backward at call {self._number} differ between workers.",
                why="tensors are the global batch, equal on all workers:\n" + self._list(inputs),
                do="seed what makes the batch (torch.randperm, a NumPy generator) alike on all workers, or draw batches"
                " by strategy.batches. The samples of a plain loop over a prepared loader are one worker's only.",
            )
        if len(set(samples)) == 1:
            raise order_differs(f"The batch of call {self._number} has other samples on some workers.")
        raise MismatchError(
            "Workers found different samples at the same index of a loader's dataset.",
            why="the dataset was made differently on each worker, e.g. by random_split or shuffling without a seed:"
            "\n" + self._list(samples),
            do="pass generator=torch.Generator().manual_seed(0) to random_split, or sort what is listed.",
        )

    def _list(self, values: Sequence[object]) -> str:
        return "\n".join(f"replica {replica}: {value}" for replica, value in enumerate(values))

    @property
    def used(self) -> np.ndarray | None:
        """Which parameters got a gradient on some replica; None if all did."""
        used = np.zeros(self._num_parameters, bool)
        for note in self.with_samples:
            if note.used is None:
                return None
            used |= note.used
        return used

    def divisors(self) -> list[float | None]:
        """What the gradients of each group of terms are divided by."""
        return [
            None if kind == "k" else sum([note.numbers[2 * group + 1] for note in self.with_samples]) or 1.0
            for group, kind in enumerate(self.groups)
        ]

    def sum_loss(self, divisors: Sequence[float | None]) -> float:
        """The loss of the whole batch."""
        total = 0.0
        for group, divisor in enumerate(divisors):
            part = 0.0
            for note in self.with_samples:
                part += note.numbers[2 * group]
            total += part if divisor is None else part / divisor
        return total
