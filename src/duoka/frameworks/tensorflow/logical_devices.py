"""Logical devices: what TensorFlow makes of one device, before its first operation."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tensorflow as tf

from duoka.devices.device import Device
from duoka.errors import DeviceError


def make_logical_devices(kind: str, index: int, limits_mb: Sequence[int | None]) -> None:
    """One for each limit; None is no limit, which is the only one that TensorFlow takes for a CPU."""
    parts = [tf.config.LogicalDeviceConfiguration(memory_limit=limit) for limit in limits_mb]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices(kind)[index], parts)


def make_logical_cpus(count: int) -> None:
    """At least so many."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    present = len(tf.config.get_logical_device_configuration(cpu) or [None])
    if present < count:
        try:
            make_logical_devices("CPU", 0, [None] * count)
        except RuntimeError:
            raise _too_late(f"{count} logical CPUs", present) from None


def divide(devices: Sequence[Device]) -> list[str]:
    """Names of the logical devices that these virtual devices become, all cut out of one device."""
    places = {(device.kind, device.index) for device in devices if isinstance(device, Device)}
    if len(places) != 1 or not all(isinstance(device, Device) for device in devices):
        raise DeviceError(
            f"Towers cannot be made on {', '.join(map(str, devices)) or 'no device'}.",
            why="the virtual devices of one device become logical devices of one process.",
            do="write tower_devices(duoka.virtual_devices('gpu:0', count=2, memory_mb=1024)), or give a number.",
        )
    ((kind, index),) = places
    limits = [device.memory_limit_mb for device in devices]
    if kind == "cpu":
        if any(limits):
            print(
                f"duoka: TensorFlow has no memory limits for logical CPUs: {', '.join(map(str, devices))} are not held"
                " to theirs in one process; as devices of a strategy they are",
                file=sys.stderr,
            )
        make_logical_cpus(len(devices))
        return [f"/CPU:{number}" for number in range(len(devices))]
    cards = tf.config.list_physical_devices("GPU")
    if index >= len(cards):
        raise DeviceError(f"TensorFlow does not see {kind}:{index}.", why=f"it sees {len(cards)} GPUs.")
    try:
        make_logical_devices("GPU", index, limits)
    except RuntimeError:
        raise _too_late(f"{len(devices)} logical GPUs on {kind}:{index}", 1) from None
    # TensorFlow counts logical devices through, card after card.
    before = sum(len(tf.config.get_logical_device_configuration(card) or [None]) for card in cards[:index])
    return [f"/GPU:{before + number}" for number in range(len(devices))]


def _too_late(what: str, present: int) -> DeviceError:
    return DeviceError(
        f"{what} cannot be made any more: there {'is' if present == 1 else 'are'} {present}.",
        why="TensorFlow has run an operation already, and its devices are fixed from then on.",
        do="call tower_devices at the top of the script, before any tensor, variable or model is made.",
    )
