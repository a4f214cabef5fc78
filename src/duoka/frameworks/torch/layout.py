"""Where each parameter's gradient lies in the flat buffers, one buffer for each type of number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_SUM_TYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Place:
    """A tensor's part of a flat buffer."""

    tensor: torch.Tensor
    name: str
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.stop].view(self.tensor.shape)


@dataclass(frozen=True)
class Group:
    """All tensors that are added up in one type of number."""

    dtype: torch.dtype
    places: tuple[Place, ...]

    @property
    def size(self) -> int:
        return self.places[-1].stop

    @property
    def numpy_dtype(self) -> np.dtype:
        return torch.empty(0, dtype=self.dtype).numpy().dtype


def lay_out(named: Sequence[tuple[str, torch.Tensor]]) -> list[Group]:
    """Put tensors side by side, in their order, grouped by the type in which they are added up.

    16-bit floats are added in 32 bits.
    """
    groups: dict[torch.dtype, list[Place]] = {}
    for name, tensor in named:
        places = groups.setdefault(_SUM_TYPES.get(tensor.dtype, tensor.dtype), [])
        places.append(Place(tensor, name, places[-1].stop if places else 0))
    return [Group(dtype, tuple(places)) for dtype, places in groups.items()]
