"""Devices that PyTorch knows and our own probing may not: Apple, Intel, AMD and others."""

from __future__ import annotations

import torch

from duoka.devices.device import Device


def list_devices() -> list[Device]:
    """The accelerators PyTorch was built for and can see. No context is made on any of them."""
    kind, count = _count_accelerators()
    kind = "gpu" if kind == "cuda" else kind
    return [Device(kind, index, title=f"{kind.upper()} seen by PyTorch") for index in range(count)]


def _count_accelerators() -> tuple[str, int]:
    if not hasattr(torch, "accelerator"):  # before PyTorch 2.6
        return ("mps", 1) if torch.backends.mps.is_available() else ("cuda", torch.cuda.device_count())
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return "cpu", 0
    if accelerator.type == "cuda":
        # Not torch.accelerator's count: that starts CUDA, and then this process can no longer fork.
        return "cuda", torch.cuda.device_count()
    return accelerator.type, torch.accelerator.device_count()


def native(device: Device, *, is_only_card: bool) -> torch.device:
    """Where PyTorch computes for this worker. A worker that sees its own card only sees it as the first one."""
    if device.kind != "gpu":
        return torch.device("cpu")
    return torch.device("cuda", 0 if is_only_card else device.index)
