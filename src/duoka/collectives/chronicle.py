"""What was called between steps and what came of it, kept for workers that come later.

A worker that takes the place of a lost one runs the script from its top. It comes by calls that the others made long
ago: those are answered from here. The list lies in a memfd. Every worker sees to it that what it has called is in the
list before it goes on, so that nothing is missing whoever is killed; the first to come writes it, the others find it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.locks import Watch, locked
from duoka.collectives.transfer import read_header, write_header

MOST_BYTES = 64 << 20  # more than that is not kept: whoever needs it cannot join
_HEAD = struct.Struct("<QQ?")  # the number of records, where the next one begins, and whether the list is closed
_START = 64
_RECORD = struct.Struct("<IQ")  # the sizes of a record's name and of what came of it
_PART = struct.Struct("<IQ")  # the sizes of an array's header and of its data


class Record(NamedTuple):
    name: str
    answer: list[Array]


class Chronicle:
    """One process's view of the list: what it has written or found there, and what it has read."""

    def __init__(self, fd: int, most_bytes: int = MOST_BYTES) -> None:
        self._fd = fd
        self._most_bytes = most_bytes
        self._next_read = _START
        self.watch: Watch | None = None  # over a wait for the lock

    @property
    def length(self) -> int:
        return self._read_head()[0]

    @property
    def is_closed(self) -> bool:
        """Nothing is added any more: what comes now cannot be told to anybody later."""
        return self._read_head()[2]

    def add(self, number: int, name: str, answer: Callable[[], Sequence[Array]]) -> None:
        """See to it that this is the record of this number. `answer` is asked only if it is to be written."""
        if self.length > number:
            return
        with self._locked():
            length, end, is_closed = self._read_head()
            if length > number or is_closed:
                return
            data = _pack(name, answer())
            if end + len(data) > self._most_bytes:
                self._write_head(length, end, is_closed=True)
                return
            try:
                _write(self._fd, data, end)
            except OSError:  # no memory for it: that is no reason for the run to end
                self._write_head(length, end, is_closed=True)
                return
            self._write_head(length + 1, end + len(data), is_closed=False)

    def close(self) -> None:
        with self._locked():
            length, end, _ = self._read_head()
            self._write_head(length, end, is_closed=True)

    def _locked(self) -> AbstractContextManager[None]:
        return locked(self._fd, "the list of calls between steps", self.watch)

    def read_next(self) -> Record:
        """The record after the one that was read last. It must be there."""
        name_bytes, answer_bytes = _RECORD.unpack(os.pread(self._fd, _RECORD.size, self._next_read))
        start = self._next_read + _RECORD.size
        name = os.pread(self._fd, name_bytes, start).decode()
        answer = _unpack(memoryview(_read(self._fd, answer_bytes, start + name_bytes)))
        self._next_read = start + name_bytes + answer_bytes
        return Record(name, answer)

    def _read_head(self) -> tuple[int, int, bool]:
        head = os.pread(self._fd, _HEAD.size, 0)
        if len(head) < _HEAD.size or not any(head):  # zeros: the first to write was killed before it came to the head
            return 0, _START, False
        return _HEAD.unpack(head)

    def _write_head(self, length: int, end: int, *, is_closed: bool) -> None:
        os.pwrite(self._fd, _HEAD.pack(length, end, is_closed), 0)


def _pack(name: str, answer: Sequence[Array]) -> bytes:
    parts = []
    for array in answer:
        header, data = write_header(array), np.ascontiguousarray(array).tobytes()
        parts += [_PART.pack(len(header), len(data)), header, data]
    body, title = b"".join(parts), name.encode()
    return _RECORD.pack(len(title), len(body)) + title + body


def _unpack(data: memoryview) -> list[Array]:
    arrays, start = [], 0
    while start < len(data):
        header_bytes, data_bytes = _PART.unpack_from(data, start)
        start += _PART.size
        array = read_header(bytes(data[start : start + header_bytes]))
        start += header_bytes
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data[start : start + data_bytes], np.uint8)
        arrays.append(array)
        start += data_bytes
    return arrays


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _read(fd: int, nbytes: int, offset: int) -> bytes:
    parts = []
    while nbytes:
        part = os.pread(fd, nbytes, offset)
        assert part, "a record ends before its end"
        parts.append(part)
        nbytes, offset = nbytes - len(part), offset + len(part)
    return b"".join(parts)
