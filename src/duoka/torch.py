"""Names of PyTorch's own, for scripts that change an import and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from duoka.frameworks.torch.splitting import Splitting
from duoka.session import connect
from duoka.strategies.strategy import Request

__all__ = ["DataParallel"]


class DataParallel(nn.Module):
    """Stands in for `torch.nn.DataParallel`: the same call, whole batch in, whole output out.

    Every worker runs the script on the whole batch, computes its rows, and ends with the same output, loss and
    weights; the loss and the optimizer stay the user's own. Make it early: what ran before it runs twice.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        devices = None if device_ids is None else [_name(device) for device in device_ids]
        session = connect(Request(devices=devices))
        self.module = module
        self.device_ids = [] if device_ids is None else list(device_ids)
        self.output_device = output_device  # accepted as it is there; outputs stay with their worker
        self.dim = dim
        self.__dict__["_splitting"] = None
        if session.num_replicas > 1:
            place = session.native_device
            self.__dict__["_splitting"] = Splitting(module, session.collective, session.seed, place, dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy (an average of weights) computes for itself: only the original splits its batches."""
        copied = DataParallel.__new__(DataParallel)
        nn.Module.__init__(copied)
        copied.module = copy.deepcopy(self.module, memo)
        copied.device_ids, copied.output_device, copied.dim = list(self.device_ids), self.output_device, self.dim
        copied.__dict__["_splitting"] = None
        return copied

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        split = self.__dict__["_splitting"]
        return self.module(*inputs, **kwargs) if split is None else split(*inputs, **kwargs)


def _name(device: int | torch.device) -> str:
    index = device.index if isinstance(device, torch.device) else device
    return f"gpu:{index}"
