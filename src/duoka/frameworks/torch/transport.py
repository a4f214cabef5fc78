"""What carries the tensors of this worker: memory shared with the other workers, or torch.distributed."""

from __future__ import annotations

import torch

from duoka.collectives.collective import Collective
from duoka.collectives.shm import SharedMemory
from duoka.collectives.torch_distributed import TorchDistributed
from duoka.strategies.strategy import Options

# One connection, kept for all strategies of a run that ask for the same.
_connected: dict[tuple[SharedMemory, bool], TorchDistributed] = {}


def carry_tensors(collective: Collective, device: torch.device, options: Options) -> Collective:
    """The collective for tensors on this device. By torch.distributed, `exact=None` means the library's own sums."""
    if options.transport == "shm" or collective.num_replicas == 1:
        return collective
    assert isinstance(collective, SharedMemory)
    if collective.joining is not None:
        collective.joining.refuse(f"torch.distributed ({options.transport}) cannot take in a worker yet")
    key = collective, options.exact is True
    if key in _connected:
        return _connected[key]
    made = TorchDistributed(collective, options.transport, device, exact=options.exact is True)
    if len(collective.workers) > 1:
        _connected[key] = made
    return made
