from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from duoka.devices.device import Device


def placing(device: Device, *, is_only_card: bool) -> AbstractContextManager[Any]:
    """Eager, and in graphs and functions that are traced inside."""
    is_first = is_only_card and device.kind != "cpu"
    return tf.device(f"/device:{device.kind.upper()}:{0 if is_first else device.index}")
