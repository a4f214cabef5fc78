"""What a model keeps beside its parameters: running statistics, which are merged, and other buffers.

Every replica starts a step from the same values. Afterwards the running statistics of normalisation layers are
the mean over replicas, weighted by rows; every other buffer is replica 0's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

# Layers whose running statistics are means over rows, so that their weighted mean makes sense.
_NORMALISATIONS = (nn.modules.batchnorm._NormBase,)
_MERGED = ("running_mean", "running_var")


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


class Statistics:
    """The buffers of these models, in order. They are looked up anew each batch: layers may replace them."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.merged: list[torch.Tensor] = []
        self.others: list[torch.Tensor] = []
        seen: set[int] = set()
        for module in _modules(models):
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                is_merged = isinstance(module, _NORMALISATIONS) and name in _MERGED
                (self.merged if is_merged else self.others).append(buffer)

    @property
    def signature(self) -> tuple[int, ...]:
        return tuple(id(buffer) for buffer in (*self.merged, *self.others))

    @property
    def other_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.others)

    def save(self) -> list[torch.Tensor]:
        return [buffer.detach().clone() for buffer in (*self.merged, *self.others)]

    def restore(self, saved: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip((*self.merged, *self.others), saved, strict=True):
                buffer.copy_(value)

    def write_others(self, place: np.ndarray) -> None:
        start = 0
        for buffer in self.others:
            data = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            place[start : start + data.size] = data
            start += data.size

    def read_others(self, place: np.ndarray) -> None:
        start = 0
        with torch.no_grad():
            for buffer in self.others:
                nbytes = buffer.numel() * buffer.element_size()
                data = torch.from_numpy(place[start : start + nbytes].copy())
                buffer.copy_(data.view(buffer.dtype).view(buffer.shape))
                start += nbytes


def _modules(models: Iterable[nn.Module]) -> Iterable[nn.Module]:
    for model in models:
        yield from model.modules()
