"""Several arrays in few flat buffers: one for each type in which they are added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array, sum_dtype
from duoka.errors import MismatchError


@dataclass(frozen=True)
class Packing:
    """Where each array lies. The same for all replicas: theirs must have the same types and shapes."""

    kinds: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
    sizes: dict[np.dtype[Any], int]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Packing:
        sizes: dict[np.dtype[Any], int] = {}
        starts = []
        for array in arrays:
            dtype = sum_dtype(array.dtype)
            starts.append(sizes.setdefault(dtype, 0))
            sizes[dtype] += array.size
        return cls(tuple((array.dtype, array.shape) for array in arrays), sizes, tuple(starts))

    @property
    def title(self) -> str:
        return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.kinds)

    def pack(self, arrays: Sequence[Array], flats: Sequence[Array], replica: int) -> None:
        kinds = tuple((array.dtype, array.shape) for array in arrays)
        if kinds != self.kinds:
            raise MismatchError(
                f"Replica {replica} gave {Packing.of(arrays).title or 'nothing'}, another one {self.title}.",
                do="let every replica give the same number of arrays, of the same types and shapes.",
            )
        for array, part in zip(arrays, self._parts(flats), strict=True):
            np.copyto(part, array.reshape(-1), casting="same_kind")

    def unpack(self, flats: Sequence[Array]) -> list[Array]:
        """Copies of the arrays, in their own types and shapes."""
        parts = zip(self._parts(flats), self.kinds, strict=True)
        return [part.astype(dtype).reshape(shape) for part, (dtype, shape) in parts]

    def _parts(self, flats: Sequence[Array]) -> list[Array]:
        by_dtype = dict(zip(self.sizes, flats, strict=True))
        return [
            by_dtype[sum_dtype(dtype)][start : start + int(np.prod(shape))]
            for (dtype, shape), start in zip(self.kinds, self.starts, strict=True)
        ]
