"""The tensors of models and optimizers by name, as bits: what must be equal on all workers between two steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from duoka.collectives.arrays import Array
from duoka.frameworks.torch.layers import Layers
from duoka.frameworks.torch.tensors import as_bytes


class TorchState:
    """As it is now: made anew for each look, because optimizers make their tensors with the first step."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Any], left_out: Collection[int] = ()) -> None:
        """`left_out`: ids of buffers that workers may have differently."""
        self.layers = Layers(models)
        self.lines: list[str] = []
        self._values: list[Any] = []
        names: dict[int, str] = {}
        for name, tensor in _tensors_of(models):
            if id(tensor) not in names and id(tensor) not in left_out:
                names[id(tensor)] = name
                self._add(name, tensor.detach())
        for number, optimizer in enumerate(optimizers, 1):
            self._add_optimizer(f"optimizer {number}", optimizer, names)

    def _add_optimizer(self, title: str, optimizer: Any, names: dict[int, str]) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for position, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter, {})
            owner = names.get(id(parameter), f"parameter {position}")
            for key in sorted(state, key=str):
                if isinstance(state[key], (torch.Tensor, int, float)):
                    self._add(f"{key} of {owner} in {title}", state[key])

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                return
            self.lines.append(f"{name}: {tuple(value.shape)} {value.dtype}")
        else:
            self.lines.append(f"{name}: {type(value).__name__}")
        self._values.append(value)

    def read(self, place: int) -> Array:
        value = self._values[place]
        if not isinstance(value, torch.Tensor):
            return np.array([value], np.int64 if isinstance(value, int) else np.float64).view(np.uint8)
        array: Array = as_bytes(value).cpu().numpy()
        return array


def _tensors_of(models: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for model in models:
        yield from model.named_parameters()
        yield from model.named_buffers()
