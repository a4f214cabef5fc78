"""On PyTorch steps are plain Python: a call is a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from duoka.collectives.arrays import Array, as_array
from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.keras.host import Backward, Forward, Host, Shape


class TorchHost(Host):
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def call(
        self, function: Callable[..., Any], arguments: Sequence[Any], like: Sequence[tuple[Shape, Any]]
    ) -> list[Any]:
        tensors = [torch.as_tensor(argument) for argument in arguments]
        results = self._wire.surfacing(function)(*(as_array(tensor.detach().cpu().contiguous()) for tensor in tensors))
        return [tensor_of(np.asarray(result)).to(tensors[0].device) for result in results]

    def differentiable(self, forward: Forward, backward: Backward) -> Callable[..., tuple[Any, ...]]:
        return lambda *arguments: _Function.apply(forward, backward, *arguments)


def tensor_of(array: Array) -> torch.Tensor:
    """The same memory as a tensor; see `as_array`. PyTorch does not know NumPy's bfloat16, but the same bits."""
    if array.dtype.name == "bfloat16":
        return torch.as_tensor(array.view(np.int16)).view(torch.bfloat16)
    return torch.as_tensor(array)


def copy_of(part: Any) -> Any:
    """Of rows, as they come from a dataset."""
    return part.clone() if isinstance(part, torch.Tensor) else copy.deepcopy(part)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Backward, *arguments: Any) -> Any:
        results, kept = forward(*arguments)
        ctx.save_for_backward(*kept)
        ctx.rule, ctx.num_others = backward, len(arguments) - 1
        return results

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return None, None, ctx.rule(ctx.saved_tensors, upstream), *[None] * ctx.num_others
