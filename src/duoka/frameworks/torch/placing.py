from __future__ import annotations

import torch

from duoka.frameworks.torch.devices import list_devices


def placing(kind: str, index: int) -> torch.device | None:
    """Where tensors and modules are made that are not told otherwise; None for a device that PyTorch does not see.

    A `torch.device` is a context of its own.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not any((device.kind, device.index) == (kind, index) for device in list_devices()):
        return None
    return torch.device("cuda" if kind == "gpu" else kind, index)
