"""Where the arrays of an outcome lie in the flat buffers of an exchange: one buffer for each type that is added up."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array, sum_dtype

_ALIGNMENT_BYTES = 64  # what XLA wants, to use memory where it lies


@dataclass(frozen=True)
class Kind:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, array: Array) -> Kind:
        return cls(tuple(array.shape), array.dtype)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


class Layout:
    """The same for all replicas: theirs have the same shapes and types."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.kinds = tuple(kinds)
        self.sizes: dict[np.dtype[Any], int] = {}
        self._starts: list[int] = []
        for kind in kinds:
            dtype = sum_dtype(kind.dtype)
            start = self.sizes.get(dtype, 0)
            start += -start % (_ALIGNMENT_BYTES // dtype.itemsize)
            self._starts.append(start)
            self.sizes[dtype] = start + kind.size

    @property
    def digest(self) -> int:
        return zlib.crc32(repr([(kind.shape, str(kind.dtype)) for kind in self.kinds]).encode())

    def views(self, flats: Sequence[Any], reshape: Callable[[Any, tuple[int, ...]], Any] = np.reshape) -> list[Any]:
        """Each array's place in these flat arrays, or tensors, in the type in which it is added up."""
        by_dtype = dict(zip(self.sizes, flats, strict=True))
        return [
            reshape(by_dtype[sum_dtype(kind.dtype)][start : start + kind.size], kind.shape)
            for kind, start in zip(self.kinds, self._starts, strict=True)
        ]
