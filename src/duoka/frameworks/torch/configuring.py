"""The share of a card that PyTorch may take."""

from __future__ import annotations

import torch

from duoka.devices.device import Device
from duoka.frameworks.too_late import say_no_meaning
from duoka.frameworks.torch.devices import native


def configure(
    device: Device, logical_cpus: int | None, *, allow_growth: bool | None, is_only_card: bool, is_first: bool
) -> None:
    """What PyTorch takes of a card always grows, up to this limit; it can be set at any time."""
    if logical_cpus is not None and is_first:
        say_no_meaning("PyTorch", logical_cpus)
    if device.kind == "gpu" and device.memory_limit_mb is not None and torch.cuda.is_available():
        place = native(device, is_only_card=is_only_card)
        total_mb = torch.cuda.get_device_properties(place).total_memory / 2**20
        torch.cuda.set_per_process_memory_fraction(min(1.0, device.memory_limit_mb / total_mb), place)
