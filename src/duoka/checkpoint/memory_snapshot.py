"""Snapshots in memory: the state of a run, in memory that outlives all workers.

The supervisor makes the memory, and every start of the workers inherits it. A *part* is what one worker writes. It has
two files, written in turn: a writer that dies while it writes leaves the older snapshot as it was. A ledger says what
each file holds. Its entry is void while the file is written, and gets its check word last.

Nothing has a name: the memory is gone with the last process that holds it. Imports no NumPy, as the supervisor reads
the ledger.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import Any, BinaryIO

from duoka.checkpoint.storage import PART_FORMAT, StoredTensor, list_parts
from duoka.errors import OutOfMemory

NUM_FILES = 2  # of each part
_ROOM = 2  # times what is written must be free: training needs memory, too
_FIELDS = struct.Struct("<qqqdq")
_CHECK = struct.Struct("<Q")
_ENTRY_BYTES = _FIELDS.size + _CHECK.size


@dataclass(frozen=True)
class Entry:
    """What one file of a part holds."""

    step: int
    boundary: int  # its number, the same on all workers; a later one is larger
    num_parts: int  # 1: one worker has written for all; else every worker has written its own part
    at: float  # the system's monotonic clock, in seconds
    nbytes: int = 0  # of this part


class Ledger:
    """What is in the files of all parts, in memory of which all workers and the supervisor see the same."""

    def __init__(self, fd: int, num_parts: int) -> None:
        self._num_parts = num_parts
        self._memory = mmap.mmap(fd, num_parts * NUM_FILES * _ENTRY_BYTES)

    def read(self, part: int, file: int) -> Entry | None:
        """None: it holds nothing, or what it holds is not complete."""
        start = self._start(part, file)
        fields = self._memory[start : start + _FIELDS.size]
        (check,) = _CHECK.unpack_from(self._memory, start + _FIELDS.size)
        return Entry(*_FIELDS.unpack(fields)) if check == _check_word(fields) else None

    def void(self, part: int, file: int) -> None:
        _CHECK.pack_into(self._memory, self._start(part, file) + _FIELDS.size, 0)

    def commit(self, part: int, file: int, entry: Entry) -> None:
        start, fields = self._start(part, file), _FIELDS.pack(*astuple(entry))
        self._memory[start : start + _FIELDS.size] = fields
        _CHECK.pack_into(self._memory, start + _FIELDS.size, _check_word(fields))

    def newest(self) -> Entry | None:
        """The newest snapshot of which all parts are complete, as part 0 has it."""
        found = [entry for file in range(NUM_FILES) if (entry := self.read(0, file)) is not None]
        whole = (entry for entry in found if self._is_whole(entry))
        return max(whole, key=lambda entry: entry.boundary, default=None)

    def _is_whole(self, entry: Entry) -> bool:
        return all(self.find(part, entry.boundary) is not None for part in range(entry.num_parts))

    def find(self, part: int, boundary: int) -> int | None:
        """The file in which this part of the snapshot of this boundary is."""
        entries = {file: self.read(part, file) for file in range(NUM_FILES)}
        return next((file for file, entry in entries.items() if entry and entry.boundary == boundary), None)

    def choose_file(self, part: int) -> int:
        """Where this part of the next snapshot is written: never over the newest snapshot that is complete."""
        if (newest := self.newest()) is not None and (kept := self.find(part, newest.boundary)) is not None:
            return NUM_FILES - 1 - kept
        boundaries = [-1 if (entry := self.read(part, file)) is None else entry.boundary for file in range(NUM_FILES)]
        return boundaries.index(min(boundaries))

    def void_after(self, step: int) -> None:
        for part in range(self._num_parts):
            for file in range(NUM_FILES):
                entry = self.read(part, file)
                if entry is not None and entry.step > step:
                    self.void(part, file)

    def close(self) -> None:
        self._memory.close()

    def _start(self, part: int, file: int) -> int:
        return (part * NUM_FILES + file) * _ENTRY_BYTES


class SnapshotMemory:
    """The supervisor's side: the memory, for all starts of the workers of one run."""

    def __init__(self, num_workers: int) -> None:
        self._files: list[tuple[int, ...]] = []
        self._ledger_fd = os.memfd_create("duoka-snapshots", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._ledger_fd, 0, num_workers * NUM_FILES * _ENTRY_BYTES)
            for _ in range(num_workers):
                # One by one: whatever is made is closed if the system refuses the next.
                self._files.append((os.memfd_create("duoka-snapshot", os.MFD_CLOEXEC),))
                self._files[-1] += (os.memfd_create("duoka-snapshot", os.MFD_CLOEXEC),)
            self.ledger = Ledger(self._ledger_fd, num_workers)
        except OSError:
            self._close_files()
            raise

    def descriptors_of(self, worker: int) -> tuple[int, ...]:
        """For one worker: the ledger, the files of part 0, and those of its own part."""
        return (self._ledger_fd, *self._files[0], *self._files[worker])

    def close(self) -> None:
        self.ledger.close()
        self._close_files()

    def _close_files(self) -> None:
        for fd in (self._ledger_fd, *(fd for files in self._files for fd in files)):
            os.close(fd)


class SnapshotFiles:
    """A worker's side: it writes its part, or part 0 for all, and reads either."""

    def __init__(
        self, descriptors: Sequence[int], worker: int, num_workers: int, available_bytes: Callable[[], int]
    ) -> None:
        ledger, *files = descriptors
        self.ledger = Ledger(ledger, num_workers)
        self._files = {worker: files[NUM_FILES:]} | {0: files[:NUM_FILES]}
        self._available_bytes = available_bytes

    def write(self, part: int, entry: Entry, tree: Any, tensors: dict[str, StoredTensor]) -> None:
        """Write a state over the older one of this part. Too little memory is an error before anything is written."""
        pieces = list_parts(tree, tensors, {"format": PART_FORMAT})
        start = next(pieces), next(pieces)
        nbytes = sum(map(len, start)) + sum(tensor.nbytes for tensor in tensors.values())
        number = self.ledger.choose_file(part)
        fd = self._files[part][number]
        self._check_room(nbytes - os.fstat(fd).st_size)
        self.ledger.void(part, number)
        if nbytes > os.fstat(fd).st_size:
            os.posix_fallocate(fd, 0, nbytes)  # a shortage is an error here, not a SIGBUS later
        os.ftruncate(fd, nbytes)  # readers want the file as long as its header says
        offset = 0
        for piece in chain(start, pieces):
            offset = _write_all(fd, piece, offset)
        self.ledger.commit(part, number, replace(entry, nbytes=nbytes))

    def _check_room(self, num_more: int) -> None:
        if num_more > 0 and _ROOM * num_more > (free := self._available_bytes()):
            needed = f"{_ROOM * num_more / 2**20:,.0f} MB of memory"
            raise OutOfMemory(f"{needed} for one cannot be had, {free / 2**20:,.0f} MB are free.")

    def open(self, part: int, entry: Entry) -> BinaryIO:
        """Open this part of a complete snapshot for reading."""
        number = self.ledger.find(part, entry.boundary)
        assert number is not None
        return open(f"/proc/self/fd/{self._files[part][number]}", "rb")


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> int:
    """Write at this offset, which is not that of the descriptor: all processes of the run share that one."""
    view = memoryview(data)
    while view:
        num_written = os.pwrite(fd, view, offset)
        view, offset = view[num_written:], offset + num_written
    return offset


def _check_word(fields: bytes) -> int:
    """Never 0, which is what an empty ledger holds."""
    return zlib.crc32(fields) | 1 << 32
