"""The start of a run: all workers have the same model, with worker 0's weights and buffers."""

from __future__ import annotations

import torch
from torch import nn

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.collectives.joining import unrecorded
from duoka.errors import MismatchError
from duoka.frameworks.start import agree_on_values
from duoka.frameworks.torch.tensors import as_bytes


def check_devices(model: nn.Module, device: torch.device) -> None:
    """A model must have values, and lie on one device: it is moved to this worker's as a whole."""
    kinds = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if "meta" in kinds:
        raise MismatchError(
            f"The {type(model).__name__} is on the meta device: it has shapes, and no values.",
            do=f"give it values first, e.g. model.to_empty(device={str(device)!r}) and initialise it.",
        )
    if len(kinds) > 1:
        raise MismatchError(
            f"The {type(model).__name__} lies on several devices: {', '.join(sorted(kinds))}.",
            why="every replica holds the whole model on one device.",
            do="leave it on the CPU and let strategy.prepare move it.",
        )


def check_layouts(model: nn.Module) -> None:
    """Parameters and buffers are compared and exchanged as plain memory."""
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise MismatchError(
                f"{name} of the {type(model).__name__} is a {kind} tensor.",
                why="workers compare parameters and buffers, and send them to each other, as plain memory.",
                do="use a dense tensor; or keep it outside of the model, or as a plain attribute of it.",
            )


def agree_on_start(model: nn.Module, collective: Collective) -> None:
    """Compare the model between workers, and copy the first worker's values to all where they differ."""
    joining = collective.joining
    if joining is not None and joining.is_newcomer:
        return  # it is given the values of a later step, and is compared then
    with unrecorded(joining):
        _agree(model, collective)


def _agree(model: nn.Module, collective: Collective) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    lines = [f"{name}: {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    values = [_bytes_of(tensor) for _, tensor in named]
    for place, value in agree_on_values(lines, values, collective, "at the start of a training", by_name=True).items():
        tensor = named[place][1]
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(value).view(tensor.dtype).view(tensor.shape).to(tensor.device))


def _bytes_of(tensor: torch.Tensor) -> Array:
    return as_bytes(tensor).cpu().numpy()
