"""Devices that PyTorch knows and our own probing may not: Apple, Intel, AMD and others."""

from __future__ import annotations

from functools import cache

import torch

from duoka.devices.device import Device
from duoka.errors import DeviceError


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
def _refuse_without_cuda(device: Device) -> None:
    """A GPU that the driver lists may be one that this build of PyTorch cannot use."""
    if torch.cuda.device_count() == 0:
        build = "CUDA" if torch.version.cuda else "ROCm" if torch.version.hip else "CPUs only"
        raise DeviceError(
            f"PyTorch does not see {device}.",
            why=f"this PyTorch ({torch.__version__}) is built for {build}.",
            do="install a PyTorch build for this GPU and driver. To train on the CPU, set CUDA_VISIBLE_DEVICES=-1.",
        )


def native(device: Device, *, is_only_card: bool) -> torch.device:
    """Where PyTorch computes for this worker. A worker that sees its own card only sees it as the first one."""
    if device.kind != "gpu":
        return torch.device("cpu")
    _refuse_without_cuda(device)
    return torch.device("cuda", 0 if is_only_card else device.index)
