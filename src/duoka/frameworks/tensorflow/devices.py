"""Devices that TensorFlow knows and our own probing does not: TPUs and pluggable devices."""

from __future__ import annotations

import tensorflow as tf

from duoka.devices.device import Device


def list_devices() -> list[Device]:
    """Physical devices other than CPUs and GPUs. The runtime is not started: it can still be configured."""
    devices = []
    for physical in tf.config.list_physical_devices():
        kind = physical.device_type.lower()
        if kind not in ("cpu", "gpu") and not kind.startswith("xla_"):
            index = int(physical.name.rsplit(":", 1)[1])
            devices.append(Device(kind, index, title=f"{kind.upper()} seen by TensorFlow"))
    return devices


def count_logical_devices(kind: str) -> int:
    """How many there are, or will be: the runtime is not started for it."""
    physical = tf.config.list_physical_devices(kind.upper())
    return sum(len(tf.config.get_logical_device_configuration(device) or [None]) for device in physical)


def count_gpus() -> tuple[int, str]:
    """How many TensorFlow sees, and what to say if it is none. The runtime is not started for it."""
    if not tf.test.is_built_with_gpu_support():
        return 0, f"this TensorFlow ({tf.__version__}) is built for CPUs only."
    found = len(tf.config.list_physical_devices("GPU"))
    return found, "its CUDA does not start with the driver and the libraries of this machine."
