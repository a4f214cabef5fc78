"""TensorFlow's logical devices, made before its first operation: after it they are fixed."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context

from duoka.devices.device import Device
from duoka.frameworks.tensorflow.logical_devices import make_logical_devices
from duoka.frameworks.too_late import too_late


def configure(
    device: Device, logical_cpus: int | None, *, allow_growth: bool | None, is_only_card: bool, is_first: bool
) -> None:
    """Growth is an environment variable: TensorFlow's own call for it refuses a card with a limit."""
    if context.context()._initialized:
        raise too_late("TensorFlow", device, logical_cpus, allow_growth)
    if logical_cpus is not None:
        make_logical_devices("CPU", 0, [None] * logical_cpus)
    if device.kind == "gpu" and device.memory_limit_mb is not None:
        index = 0 if is_only_card else device.index
        if index < len(tf.config.list_physical_devices("GPU")):  # a build without CUDA sees no card
            make_logical_devices("GPU", index, [device.memory_limit_mb])
