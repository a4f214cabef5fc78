"""The start of a run: all workers have the same model, with worker 0's weights and buffers."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import nn

from duoka.collectives.collective import Collective
from duoka.errors import MismatchError
from duoka.frameworks.structure import raise_difference


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


def agree_on_start(model: nn.Module, collective: Collective) -> None:
    """Compare the structure of the model between workers, then copy the first worker's values to all."""
    if len(collective.workers) == 1:
        return
    _compare(model, collective)
    for tensor in (*model.parameters(), *model.buffers()):
        _copy_from_first(tensor, collective)


def _compare(model: nn.Module, collective: Collective) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    lines = [f"{name}: {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    digest = np.frombuffer(hashlib.sha256("\n".join(lines).encode()).digest(), np.uint8)
    if len({bytes(part) for part in collective.all_gather([digest] * len(collective.replicas))}) > 1:
        raise_difference(lines, collective)


def _copy_from_first(tensor: torch.Tensor, collective: Collective) -> None:
    with torch.no_grad():
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        received = collective.broadcast(data)
        if collective.worker != collective.placement.owner(0):
            tensor.copy_(torch.from_numpy(received).view(tensor.dtype).view(tensor.shape).to(tensor.device))
