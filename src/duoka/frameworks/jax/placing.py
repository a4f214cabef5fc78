from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax

from duoka.devices.device import Device


def placing(device: Device, *, is_only_card: bool) -> AbstractContextManager[Any]:
    """JAX starts its backend here: its devices are not known before. It has one CPU, unless told otherwise."""
    devices = jax.local_devices(backend=device.kind)
    index = 0 if is_only_card else device.index
    return jax.default_device(devices[min(index, len(devices) - 1)])
