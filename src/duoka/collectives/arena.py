"""Memory that all workers of a host see.

The supervisor makes one memfd; workers cut pieces out of it. Who asks for a piece first makes it, and writes into
a directory at the beginning of the memfd where it lies; the others find it there, and so does a worker that comes
later and asks for fewer pieces, or in another order. A memfd has no name and no file: when the last process is
gone, so is the memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duoka.collectives.directory import Directory
from duoka.collectives.locks import Watch
from duoka.errors import OutOfMemory

PAGE = mmap.PAGESIZE

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value

Bytes = NDArray[np.uint8]


def round_to_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Arena:
    """Pieces of one shared file, handed out once and never taken back.

    Without a file descriptor the memory is this process's own: the same code then serves one worker.
    """

    def __init__(self, fd: int | None, *, available_bytes: Callable[[], int]) -> None:
        self._fd = fd
        self._available_bytes = available_bytes
        self._directory = None if fd is None else Directory(fd)
        self._asked: Counter[str] = Counter()

    def watch_waits(self, watch: Watch) -> None:
        """Let a wait for other processes, which takes a moment, be watched if it does not end."""
        if self._directory is not None:
            self._directory.watch = watch

    def reserve(self, nbytes: int, purpose: str) -> Piece:
        """A piece of at least this size, really there: shortage is an error now, not a SIGBUS later.

        The n-th piece of a size for a purpose is the same memory on all workers.
        """
        size = max(PAGE, round_to_pages(nbytes))
        try:
            if self._fd is None or self._directory is None:
                self._check(size, purpose)
                return Piece(None, 0, size)
            title = f"{purpose}, {size} bytes"
            offset = self._directory.find(
                f"{title}, number {self._asked[title]}", size, lambda: self._check(size, purpose)
            )
            piece = Piece(self._fd, offset, size)
        except OSError as error:
            raise _shortage(size, self._available_bytes(), purpose) from error
        self._asked[title] += 1
        return piece

    def _check(self, size: int, purpose: str) -> None:
        available = self._available_bytes()
        if size > available:
            raise _shortage(size, available, purpose)


class Piece:
    """A page-aligned range of an arena, mapped into this process."""

    def __init__(self, fd: int | None, offset: int, nbytes: int) -> None:
        self._fd = fd
        self.offset = offset
        self.nbytes = nbytes
        self.bytes: Bytes = (
            np.frombuffer(mmap.mmap(-1, nbytes), np.uint8) if fd is None else _map(fd, [(offset, nbytes)])
        )

    def array(self, dtype: np.dtype[Any], count: int, offset: int = 0) -> NDArray[Any]:
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype)

    def stitch(self, ranges: Sequence[tuple[int, int]]) -> Bytes:
        """These (offset, nbytes) ranges, page-aligned, as one contiguous array over the same memory.

        The pages are mapped a second time, side by side, so that nothing is copied.
        """
        if len(ranges) == 1 or self._fd is None:
            assert len(ranges) == 1, "private memory has one owner, so one range"
            offset, nbytes = ranges[0]
            return self.bytes[offset : offset + nbytes]
        return _map(self._fd, [(self.offset + offset, nbytes) for offset, nbytes in ranges])


def _map(fd: int, ranges: Sequence[tuple[int, int]]) -> Bytes:
    return np.asarray(_Mapping(fd, ranges))


class _Mapping:
    """Owns a range of addresses; NumPy keeps it alive as the base of the arrays made from it.

    Python's own mmap would keep a copy of the descriptor for each, and cannot put two ranges side by side.
    """

    _address = 0

    def __init__(self, fd: int, ranges: Sequence[tuple[int, int]]) -> None:
        self._nbytes = sum(nbytes for _, nbytes in ranges)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        # Without access: writable, it would count against a memory limit, if only until it is mapped over.
        self._address = _mmap(None, self._nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        place = self._address
        for offset, nbytes in ranges:
            populate = getattr(mmap, "MAP_POPULATE", 0)
            _mmap(place, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED | populate, fd, offset)
            place += nbytes
        self.__array_interface__ = {
            "data": (self._address, False),
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        if self._address and _LIBC is not None:  # at the end of the interpreter names may be gone
            _LIBC.munmap(ctypes.c_void_p(self._address), ctypes.c_size_t(self._nbytes))


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    result = _LIBC.mmap(address, nbytes, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def _shortage(size: int, available: int, purpose: str) -> OutOfMemory:
    return OutOfMemory(
        f"{size / 2**20:,.0f} MB of shared memory for {purpose} cannot be had.",
        why=f"{available / 2**20:,.0f} MB are free on this machine.",
        do="use fewer replicas or a smaller model, or end what else holds memory (`duoka devices` shows who).",
    )
