"""What every worker last said of itself, in shared memory: one row each, written by that worker alone.

The rows serve three ends: after a meeting everybody compares what the others called, an error can say where
a missing worker was seen last, and the supervisor knows what a worker computed when it died. They are read only
after the kernel has told us that something was written, or that the deadline has passed; never polled.

Behind the rows stands what the supervisor alone writes: that the run is to end at a border. It is looked at there.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass

ROW_BYTES = 1024
_FIXED = struct.Struct("<qqqq")  # pid, begun calls, completed calls, committed steps
# The user's step, the replicas under way (first, and one behind the last), and whether their loop was left.
_WORK = struct.Struct("<qqqq")
_PACE = struct.Struct("<d")  # what its steps lengthen deadlines to, in seconds
_HEAD_BYTES = _FIXED.size + _WORK.size + _PACE.size
_CALL_BYTES = (ROW_BYTES - _HEAD_BYTES) // 2
_CALLS = (_HEAD_BYTES, _HEAD_BYTES + _CALL_BYTES)
_CALL = struct.Struct("<qI")  # the offer that this worker knew of when it called, and the length of the call
_WISH = struct.Struct("<q")  # whether the run is to end at the next border
_MAIN = struct.Struct("<q")  # the worker that prints and writes for all
BEFORE_LINE = b"\0"  # in a call: the line of the script that made it follows
_LONGEST_CALL = _CALL_BYTES - 40


@dataclass(frozen=True)
class Row:
    pid: int
    begun: int
    completed: int
    steps: int


@dataclass(frozen=True)
class Work:
    """What a worker computes: these replicas of a step. None of them: it has been at work for this step before."""

    step: int = 0
    start: int = 0
    stop: int = 0
    is_left: bool = False  # a loop was left in their middle: by an error, or to do something else

    @property
    def is_under_way(self) -> bool:
        return self.stop > self.start

    @classmethod
    def of(cls, step: int, replicas: Sequence[int], is_left: bool = False) -> Work:
        return cls(step, min(replicas), max(replicas) + 1, is_left) if replicas else cls(step)

    def overlaps(self, other: Work) -> bool:
        """
        >>> Work(7, 2, 4).overlaps(Work(7, 3, 4)), Work(7, 2, 4).overlaps(Work(8, 2, 4)), Work(7).overlaps(Work(7))
        (True, False, False)
        """
        return self.step == other.step and max(self.start, other.start) < min(self.stop, other.stop)

    def __str__(self) -> str:
        """
        >>> str(Work(1204, 3, 4)), str(Work(7, 0, 2)), str(Work(7))
        ('replica 3 at step 1204', 'replicas 0 to 1 at step 7', 'step 7')
        """
        if not self.is_under_way:
            return f"step {self.step}"
        last = self.stop - 1
        replicas = f"replica {last}" if last == self.start else f"replicas {self.start} to {last}"
        return f"{replicas} at step {self.step}"


def board_bytes(num_workers: int) -> int:
    return num_workers * ROW_BYTES + _WISH.size + _MAIN.size


class Board:
    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._shared = memory
        self._memory = memoryview(memory)
        self._end = len(self._memory) - _WISH.size - _MAIN.size  # of the rows

    @classmethod
    def of_fd(cls, fd: int, num_workers: int) -> Board:
        return cls(mmap.mmap(fd, board_bytes(num_workers)))

    def close(self) -> None:
        """The mapping holds a descriptor of its own."""
        self._memory.release()
        if isinstance(self._shared, mmap.mmap):
            self._shared.close()

    def write(self, worker: int, pid: int, begun: int, completed: int, steps: int) -> None:
        _FIXED.pack_into(self._memory, worker * ROW_BYTES, pid, begun, completed, steps)

    def read(self, worker: int) -> Row:
        return Row(*_FIXED.unpack_from(self._memory, worker * ROW_BYTES))

    def find(self, pid: int) -> int | None:
        """The worker that is this process."""
        workers = range(len(self._memory) // ROW_BYTES)
        return next((worker for worker in workers if self.read(worker).pid == pid), None)

    def write_work(self, worker: int, work: Work) -> None:
        values = work.step, work.start, work.stop, int(work.is_left)
        _WORK.pack_into(self._memory, worker * ROW_BYTES + _FIXED.size, *values)

    def read_work(self, worker: int) -> Work:
        step, start, stop, is_left = _WORK.unpack_from(self._memory, worker * ROW_BYTES + _FIXED.size)
        return Work(step, start, stop, bool(is_left))

    def write_pace(self, worker: int, seconds: float) -> None:
        _PACE.pack_into(self._memory, worker * ROW_BYTES + _FIXED.size + _WORK.size, seconds)

    def read_pace(self, worker: int) -> float:
        (seconds,) = _PACE.unpack_from(self._memory, worker * ROW_BYTES + _FIXED.size + _WORK.size)
        return float(seconds)

    def wish_end(self) -> None:
        _WISH.pack_into(self._memory, self._end, 1)

    def is_end_wished(self) -> bool:
        (is_wished,) = _WISH.unpack_from(self._memory, self._end)
        return bool(is_wished)

    def move_main(self, worker: int) -> None:
        _MAIN.pack_into(self._memory, self._end + _WISH.size, worker)

    def read_main(self) -> int:
        (worker,) = _MAIN.unpack_from(self._memory, self._end + _WISH.size)
        return int(worker)

    def write_call(self, worker: int, number: int, call: bytes, offer: int = 0) -> None:
        """What this worker calls now; two places in turn, so that a quick one never overwrites what is still read."""
        start = worker * ROW_BYTES + _CALLS[number & 1]
        if len(call) > _LONGEST_CALL:
            # What does not fit still counts in the comparison.
            call = call[:_LONGEST_CALL] + b"... #" + hashlib.blake2b(call, digest_size=8).hexdigest().encode()
        _CALL.pack_into(self._memory, start, offer, len(call))
        self._memory[start + _CALL.size : start + _CALL.size + len(call)] = call

    def read_call(self, worker: int, number: int) -> bytes:
        start = worker * ROW_BYTES + _CALLS[number & 1]
        _, length = _CALL.unpack_from(self._memory, start)
        return bytes(self._memory[start + _CALL.size : start + _CALL.size + length])

    def read_offer(self, worker: int, number: int) -> int:
        """Which candidate's offer this worker knew of when it made this call; 0: of none."""
        offer, _ = _CALL.unpack_from(self._memory, worker * ROW_BYTES + _CALLS[number & 1])
        return int(offer)

    def tell_activity(self, worker: int) -> str:
        """Where this worker was seen last, for errors."""
        row = self.read(worker)
        if row.begun > row.completed:
            return self.read_call(worker, row.begun).replace(BEFORE_LINE, b" at ").decode(errors="replace")
        return f"its own code, after call {row.completed}" if row.begun else "its start-up"
