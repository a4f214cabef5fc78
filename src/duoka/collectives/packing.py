"""Several arrays in few flat buffers: one for each type in which they are added up."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array, sum_dtype
from duoka.errors import MismatchError

_ALIGNMENT_BYTES = 64  # what XLA wants, to use memory where it lies


@dataclass(frozen=True)
class Kind:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Array) -> Kind:
        return cls(array.dtype, tuple(array.shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Packing:
    """Where each array lies. The same for all replicas: theirs must have the same types and shapes."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.kinds = tuple(kinds)
        self.sizes: dict[np.dtype[Any], int] = {}
        self._places: list[tuple[int, slice]] = []  # which flat array, and where in it
        for kind in kinds:
            dtype = sum_dtype(kind.dtype)
            start = self.sizes.get(dtype, 0)
            start += -start % (_ALIGNMENT_BYTES // dtype.itemsize)
            stop = self.sizes[dtype] = start + kind.size
            self._places.append((list(self.sizes).index(dtype), slice(start, stop)))

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Packing:
        return cls([Kind.of(array) for array in arrays])

    @property
    def title(self) -> str:
        return ", ".join(map(str, self.kinds))

    @property
    def digest(self) -> int:
        return zlib.crc32(self.title.encode())

    def pack(self, arrays: Sequence[Array], flats: Sequence[Array], replica: int) -> None:
        given = Packing.of(arrays)
        if given.kinds != self.kinds:
            raise MismatchError(
                f"Replica {replica} gave {given.title or 'nothing'}, another one {self.title}.",
                do="let every replica give the same number of arrays, of the same types and shapes.",
            )
        for array, view in zip(arrays, self.views(flats), strict=True):
            np.copyto(view, array, casting="same_kind")

    def unpack(self, flats: Sequence[Array]) -> list[Array]:
        """Copies of the arrays, in their own types and shapes."""
        return [view.astype(kind.dtype) for view, kind in zip(self.views(flats), self.kinds, strict=True)]

    def views(self, flats: Sequence[Any], reshape: Callable[[Any, tuple[int, ...]], Any] = np.reshape) -> list[Any]:
        """Each array's place in these flat arrays, or tensors, in the type in which it is added up."""
        return [
            reshape(flats[number][place], kind.shape)
            for kind, (number, place) in zip(self.kinds, self._places, strict=True)
        ]
