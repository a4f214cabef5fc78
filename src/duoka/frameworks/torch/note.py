"""What a replica says beside its gradient: how it was weighted, and what its loop body did. Everybody reads it all."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from duoka.collectives.staging import LONGEST_NOTE
from duoka.errors import MismatchError

_HEAD = struct.Struct("<dd??IIHHH")
_LONGEST_STORY = 600
RATES = "; learning rates "
_PLATEAU = re.compile(r"(ReduceLROnPlateau \(scheduler \d+\)): best ([^\s,]+)")
_DO_RATES = (
    "step schedulers on every worker, not under `if strategy.is_main`, and once per global batch. Pass a scheduler of"
    " torch.optim.lr_scheduler to strategy.prepare. Any other scheduler, and a rate set by hand, steps once per batch"
    " in function style (strategy.backward), or with one replica per worker.\n"
    "A scheduler that takes a number (ReduceLROnPlateau) needs one that is equal on all workers: strategy.mean(loss)"
    " after the loop, or strategy.evaluate(function, loader)."
)


@dataclass(frozen=True)
class Note:
    weight: float  # rows of the whole batch, or the count given with strategy.weigh
    is_counted: bool
    is_nan: bool  # its loss was
    story: str  # what the body called and at which learning rates; equal for all replicas, or it is an error
    used: np.ndarray  # which parameters got a gradient
    others: int = 0  # a digest of the buffers of which replica 0's count
    moved: tuple[int, ...] = ()  # buffers that it changed, and that do not travel yet
    start: int = 0  # a digest of the buffers that the batch began with
    loss: float = 0.0
    numbers: bytes = b""  # what the body has handed in

    def pack(self) -> bytes:
        story, moved = self.story.encode(), np.array(self.moved, np.uint16)
        flags = self.weight, self.loss, self.is_counted, self.is_nan
        head = _HEAD.pack(*flags, self.others, self.start, len(story), len(moved), len(self.numbers))
        bits = b"" if self.used.all() else np.packbits(self.used).tobytes()
        return head + story + moved.tobytes() + self.numbers + bits

    @property
    def room(self) -> int:
        """How many bytes of numbers fit beside the rest."""
        return LONGEST_NOTE - len(replace(self, numbers=b"").pack())

    def without_weight(self) -> Note:
        """For a replica whose rows were computed together with another one's."""
        return replace(self, weight=0.0)

    @classmethod
    def unpack(cls, data: bytes, num_parameters: int) -> Note:
        weight, loss, is_counted, is_nan, others, start, *lengths = _HEAD.unpack_from(data)
        story_end = _HEAD.size + lengths[0]
        moved_end = story_end + 2 * lengths[1]
        numbers_end = moved_end + lengths[2]
        story, numbers, bits = data[_HEAD.size : story_end], data[moved_end:numbers_end], data[numbers_end:]
        moved = tuple(np.frombuffer(data[story_end:moved_end], np.uint16).tolist())
        if bits:
            used = np.unpackbits(np.frombuffer(bits, np.uint8), count=num_parameters).astype(bool)
        else:
            used = np.ones(num_parameters, bool)
        text = story.decode(errors="replace")
        return cls(weight, is_counted, is_nan, text, used, others, moved, start, loss, numbers)


def read_story(packed: bytes) -> bytes:
    """Out of a packed note: what must be the same for all replicas."""
    length = _HEAD.unpack_from(packed)[6]
    return packed[_HEAD.size : _HEAD.size + length]


def tell_story(last_calls: Sequence[str], calls: Sequence[str], rates: Iterable[str]) -> str:
    """One line, short enough to travel at every step: its end gives way to a digest."""
    before = f"before: {', '.join(last_calls) or 'nothing'}; " if last_calls else ""
    story = f"{before}now: {', '.join(calls)}{RATES}{', '.join(rates) or 'none'}"
    if len(story) <= _LONGEST_STORY:
        return story
    return f"{story[:_LONGEST_STORY]}... {hashlib.sha256(story.encode()).hexdigest()[:16]}"


def compare_stories(stories: Sequence[str], step: int) -> None:
    """All workers see the same notes, so either all of them raise or none."""
    if len(set(stories)) == 1:
        return
    by_story: dict[str, list[int]] = {}
    for replica, story in enumerate(stories):
        by_story.setdefault(story, []).append(replica)
    named = {
        f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}": story
        for story, replicas in by_story.items()
    }
    if len({story.partition(RATES)[0] for story in stories}) == 1:
        rates = {replicas: story.partition(RATES)[2] for replicas, story in named.items()}
        raise rates_differ(rates, f"At step {step}", _DO_RATES)
    listing = "\n".join(f"{replicas}: {story}" for replicas, story in named.items())
    raise MismatchError(
        f"At step {step} the loop bodies of the replicas did not do the same.",
        why=listing,
        do="let every body call the same things: count with strategy.enumerate or strategy.step, guard what"
        " runs once per batch with `if strategy.stepped:`, leave a batch out on all replicas or on none.",
    )


def rates_differ(rates: Mapping[str, str], when: str, do: str) -> MismatchError:
    """Return the error for learning rates, or numbers passed to ReduceLROnPlateau, that differ.

    >>> rates = {"worker 0": "optimizer 1: 0.1, ReduceLROnPlateau (scheduler 1): best 0.5"}
    >>> rates["worker 1"] = "optimizer 1: 0.1, ReduceLROnPlateau (scheduler 1): best 0.7"
    >>> print(rates_differ(rates, "At step 3", "").what)
    At step 3 ReduceLROnPlateau (scheduler 1) was passed numbers that differ between workers.
    """
    listing = "\n".join(f"{owner}: {text}" for owner, text in rates.items())
    found = {text: dict(_PLATEAU.findall(text)) for text in rates.values()}
    first, *others = found.values()
    for name in first:
        if any(other.get(name) != first[name] for other in others):
            return MismatchError(
                f"{when} {name} was passed numbers that differ between workers.",
                why=f"{listing}\nIt would change the learning rate at a different time on each worker.",
                do="pass a number that is equal on all workers: strategy.evaluate(function, loader), or"
                " strategy.mean(loss) after the loop. In function style, pass the loss that strategy.backward"
                " returns: it is the loss of the global batch. Step it on every worker, not under"
                " `if strategy.is_main`.",
            )
    return MismatchError(f"{when} the learning rates differ.", why=listing, do=do)


class Notes:
    """All replicas' notes of one exchange. Everybody draws the same conclusions from them."""

    def __init__(self, packed: Sequence[bytes], num_parameters: int, step: int) -> None:
        self._notes = [Note.unpack(note, num_parameters) for note in packed]
        self._step = step
        compare_stories([note.story for note in self._notes], step)
        self.used = np.logical_or.reduce([note.used for note in self._notes])
        self.moved = sorted({position for note in self._notes for position in note.moved})
        self.divisor = self._sum_of_counts()

    def _sum_of_counts(self) -> float | None:
        """What to divide by when the user gave counts."""
        if not any(note.is_counted for note in self._notes):
            return None
        if not all(note.is_counted for note in self._notes):
            raise MismatchError(
                f"At step {self._step} some replicas gave a count with strategy.weigh and others did not.",
                do="call strategy.weigh in every loop body, also when the count is zero.",
            )
        return float(sum(note.weight for note in self._notes)) or 1.0

    @property
    def losses(self) -> list[float]:
        return [note.loss for note in self._notes]

    @property
    def numbers(self) -> list[bytes]:
        """What the bodies have handed in, packed."""
        return [note.numbers for note in self._notes]

    @property
    def are_alike(self) -> bool:
        """Whether all replicas sent the same digest."""
        return len({note.others for note in self._notes}) == 1

    def tell(self, tell: Callable[[str, str], None], names: Sequence[str], buffers: Sequence[str]) -> None:
        """Say once what a user should know of."""
        everywhere = np.logical_and.reduce([note.used for note in self._notes])
        if not np.array_equal(self.used, everywhere):
            unused = [names[int(index)] for index in np.flatnonzero(self.used & ~everywhere)]
            more = f" and {len(unused) - 5} more" if unused[5:] else ""
            tell(f"no gradient from some replicas, counted as zero: {', '.join(unused[:5])}{more}", "unused")
        if nan := [replica for replica, note in enumerate(self._notes) if note.is_nan and note.weight]:
            text = f"the loss of replica {nan[0]} is NaN at step {self._step}, and with it the whole gradient"
            tell(text, "nan")
        if len({note.start for note in self._notes}) > 1:
            text = "running statistics or other buffers were changed after the last backward of a batch, and differ"
            tell(f"{text} between workers; forward passes in training mode belong before it", "late buffers")
        if len({note.others for note in self._notes if note.weight}) > 1:
            known = ", ".join(sorted(set(buffers))[:5])
            tell(f"buffers differ between replicas, and replica 0's count: {known}", "buffers")
