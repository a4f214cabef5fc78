"""Where the pieces of a shared file lie: a list at its beginning, which every process of a run reads and adds to.

A process that adds an entry holds a lock that the kernel releases when it dies. The memory of a piece is there before
its entry, and an entry before the number of entries says so: whoever dies in between leaves nothing half-done.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable

from duoka.collectives.locks import Watch, locked
from duoka.errors import OutOfMemory

DIRECTORY_BYTES = 1 << 20  # of the file, not of memory: pages that nobody has written are not there
_HEAD = struct.Struct("<QQ")  # the number of entries, and where the next piece begins
_ENTRY = struct.Struct("<16sQQ")  # the name, shortened; where it lies; its size
_MOST_ENTRIES = (DIRECTORY_BYTES - _HEAD.size) // _ENTRY.size


class Directory:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.watch: Watch | None = None  # over a wait for the lock
        self._known: dict[bytes, tuple[int, int]] = {}
        self._num_read = 0

    def find(self, name: str, nbytes: int, check: Callable[[], None]) -> int:
        """Where this piece lies. It is made if nobody has, after `check` has let it pass."""
        key = hashlib.blake2b(name.encode(), digest_size=16).digest()
        with locked(self._fd, "the list of pieces of shared memory", self.watch):
            end = self._read_on()
            if key not in self._known:
                check()
                self._add(key, end, nbytes)
            offset, size = self._known[key]
        assert size == nbytes, f"{name}: {size} bytes"
        return offset

    def _read_on(self) -> int:
        """Read what has been added. Returns where the next piece will begin."""
        head = os.pread(self._fd, _HEAD.size, 0)
        count, end = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
        start = _HEAD.size + self._num_read * _ENTRY.size
        for key, offset, size in _ENTRY.iter_unpack(os.pread(self._fd, (count - self._num_read) * _ENTRY.size, start)):
            self._known[key] = offset, size
        self._num_read = count
        return max(end, DIRECTORY_BYTES)

    def _add(self, key: bytes, offset: int, nbytes: int) -> None:
        if self._num_read == _MOST_ENTRIES:
            raise OutOfMemory(f"There are {_MOST_ENTRIES:,} pieces of shared memory, and no room to list another one.")
        os.posix_fallocate(self._fd, offset, nbytes)
        os.pwrite(self._fd, _ENTRY.pack(key, offset, nbytes), _HEAD.size + self._num_read * _ENTRY.size)
        os.pwrite(self._fd, _HEAD.pack(self._num_read + 1, offset + nbytes), 0)
        self._known[key] = offset, nbytes
        self._num_read += 1
