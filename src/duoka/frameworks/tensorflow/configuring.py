"""TensorFlow's logical devices, made before its first operation: after it they are fixed."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context

from duoka.devices.device import Device
from duoka.frameworks.too_late import too_late


def configure(device: Device, logical_cpus: int | None, *, allow_growth: bool | None, is_only_card: bool) -> None:
    """Growth is an environment variable: TensorFlow's own call for it refuses a card with a limit."""
    if context.context()._initialized:
        raise too_late("TensorFlow", device, logical_cpus, allow_growth)
    if logical_cpus is not None:
        _divide("CPU", 0, [tf.config.LogicalDeviceConfiguration()] * logical_cpus)
    if device.kind == "gpu" and device.memory_limit_mb is not None:
        limited = tf.config.LogicalDeviceConfiguration(memory_limit=device.memory_limit_mb)
        _divide("GPU", 0 if is_only_card else device.index, [limited])


def _divide(kind: str, index: int, parts: list[tf.config.LogicalDeviceConfiguration]) -> None:
    physical = tf.config.list_physical_devices(kind)
    if index < len(physical):  # a build without CUDA sees no card
        tf.config.set_logical_device_configuration(physical[index], parts)
