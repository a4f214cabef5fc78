"""What every worker last said of itself, in shared memory: one row each, written by that worker alone.

The rows serve two ends: after a meeting everybody compares what the others called, and an error can
say where a missing worker was seen last. They are read only after the kernel has told us that
something was written (or that the writer is dead), never polled.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

ROW_BYTES = 1024
_CALL_BYTES = 384
_FIXED = struct.Struct("<qqqI")  # pid, completed calls, committed steps, length of the activity
_ACTIVITY = slice(_FIXED.size, 192)
_CALLS = (192, 192 + _CALL_BYTES)
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Row:
    pid: int
    completed: int
    steps: int
    activity: str


def board_bytes(num_workers: int) -> int:
    return num_workers * ROW_BYTES


class Board:
    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memoryview(memory)

    @classmethod
    def of_fd(cls, fd: int, num_workers: int) -> Board:
        return cls(mmap.mmap(fd, board_bytes(num_workers)))

    def write(self, worker: int, row: Row) -> None:
        start = worker * ROW_BYTES
        activity = row.activity.encode()[: _ACTIVITY.stop - _ACTIVITY.start]
        _FIXED.pack_into(self._memory, start, row.pid, row.completed, row.steps, len(activity))
        begin = start + _ACTIVITY.start
        self._memory[begin : begin + len(activity)] = activity

    def read(self, worker: int) -> Row:
        start = worker * ROW_BYTES
        pid, completed, steps, length = _FIXED.unpack_from(self._memory, start)
        begin = start + _ACTIVITY.start
        text = bytes(self._memory[begin : begin + length]).decode(errors="replace")
        return Row(pid, completed, steps, text)

    def write_call(self, worker: int, parity: int, call: bytes) -> None:
        """What this worker calls now; two places in turn, so that a quick worker never overwrites one still read."""
        start = worker * ROW_BYTES + _CALLS[parity]
        call = call[: _CALL_BYTES - _LENGTH.size]
        _LENGTH.pack_into(self._memory, start, len(call))
        self._memory[start + _LENGTH.size : start + _LENGTH.size + len(call)] = call

    def read_call(self, worker: int, parity: int) -> bytes:
        start = worker * ROW_BYTES + _CALLS[parity]
        (length,) = _LENGTH.unpack_from(self._memory, start)
        return bytes(self._memory[start + _LENGTH.size : start + _LENGTH.size + length])
