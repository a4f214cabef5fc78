"""Devices that PyTorch knows and our own probing may not: Apple, Intel, AMD and others."""

from __future__ import annotations

from functools import cache

import torch

from duoka.devices.device import Device
from duoka.frameworks.unseen import refuse_unseen


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


@cache
def count_gpus() -> tuple[int, str]:
    """How many PyTorch sees, and what to say if it is none."""
    if torch.version.cuda is None and torch.version.hip is None:
        return 0, f"this PyTorch ({torch.__version__}) is built for CPUs only."
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return torch.cuda.device_count(), f"its {build} does not start with the driver of this machine."


def native(device: Device, *, is_only_card: bool) -> torch.device:
    """Where PyTorch computes for this worker. A worker that sees its own card only sees it as the first one."""
    if device.kind != "gpu":
        return torch.device("cpu")
    refuse_unseen("torch", device)
    return torch.device("cuda", 0 if is_only_card else device.index)
