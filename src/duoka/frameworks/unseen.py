"""A GPU that the driver lists, and that the installed framework cannot use: an error, and never the CPU instead."""

from __future__ import annotations

import importlib

from duoka.devices.device import Device
from duoka.errors import DeviceError

_TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX"}


def refuse_unseen(framework: str, device: Device) -> None:
    """Raise if this worker's device is a GPU and the framework sees none."""
    if device.kind != "gpu":
        return
    found: tuple[int, str] = importlib.import_module(f"duoka.frameworks.{framework}.devices").count_gpus()
    count, reason = found
    if count == 0:
        title = _TITLES[framework]
        raise DeviceError(
            f"{title} does not see {device}.",
            why=reason,
            do=f"install a build of {title} for this GPU and driver. To train on the CPU, set CUDA_VISIBLE_DEVICES=-1.",
        )
