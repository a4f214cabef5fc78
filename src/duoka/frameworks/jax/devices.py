"""Devices that JAX knows and our own probing does not: TPUs and other platforms."""

from __future__ import annotations

import jax
from jax._src import xla_bridge

from duoka.devices.device import Device


def list_devices() -> list[Device]:
    """Devices of other platforms than CPU and CUDA, if JAX has started; it is never started for this.

    Starting it would take most of every card's memory and fix the platform for the whole process.
    """
    if not xla_bridge.backends_are_initialized():  # JAX has no public way to ask.
        return []
    others = [device for device in jax.local_devices() if device.platform.lower() not in ("cpu", "gpu", "cuda")]
    return [
        Device(device.platform.lower(), index, title=f"{device.device_kind} seen by JAX")
        for index, device in enumerate(others)
    ]


def count_gpus() -> tuple[int, str]:
    """How many JAX sees, and what to say if it is none. JAX is started for it: this is asked when training begins."""
    try:
        return len(jax.local_devices(backend="gpu")), ""
    except RuntimeError as error:  # no such backend
        return 0, f"this JAX ({jax.__version__}) has no GPU backend: {error}"
