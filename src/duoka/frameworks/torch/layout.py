"""Where each tensor lies in the flat buffers, one buffer for each type of number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_SUM_TYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Layout:
    """Tensors side by side, in their order, grouped by the type in which they are added up."""

    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]
    places: tuple[tuple[int, int, torch.Size], ...]  # for each tensor: its group, its start there, its shape

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layout:
        dtypes: list[torch.dtype] = []
        sizes: list[int] = []
        places = []
        for tensor in tensors:
            dtype = _SUM_TYPES.get(tensor.dtype, tensor.dtype)
            if dtype not in dtypes:
                dtypes.append(dtype)
                sizes.append(0)
            group = dtypes.index(dtype)
            places.append((group, sizes[group], tensor.shape))
            sizes[group] += tensor.numel()
        return cls(tuple(dtypes), tuple(sizes), tuple(places))

    def views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each tensor's part of these flat ones, in its shape."""
        return [flats[group][start : start + shape.numel()].view(shape) for group, start, shape in self.places]


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
