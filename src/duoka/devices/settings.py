"""What a strategy is told about memory, and about how many devices count: read, checked, and laid on devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from duoka.devices.device import Device
from duoka.devices.probe import Inventory, say_count
from duoka.devices.virtual import MAX_SLICES, read_count
from duoka.errors import DeviceError

_KINDS = ("GPU", "CPU")


@dataclass(frozen=True)
class Settings:
    """As asked, each None where it was not."""

    memory_fraction: float | None = None
    memory_limit_mb: int | None = None
    num_gpus: int | None = None  # the first so many count
    num_cpus: int | None = None  # logical ones, which only TensorFlow has


def read_settings(memory_fraction: Any = None, memory_limit_mb: Any = None, device_count: Any = None) -> Settings:
    """
    >>> read_settings(memory_fraction=0.8, device_count={"GPU": 1, "CPU": 56})
    Settings(memory_fraction=0.8, memory_limit_mb=None, num_gpus=1, num_cpus=56)
    """
    if memory_fraction is not None and memory_limit_mb is not None:
        raise DeviceError(
            f"memory_fraction={memory_fraction!r} and memory_limit_mb={memory_limit_mb!r} are given together.",
            why="both limit the same memory.",
            do="give one of them.",
        )
    if memory_limit_mb is not None:
        memory_limit_mb = read_count(memory_limit_mb, "memory_limit_mb", most=None)
    counts = _read_device_count(device_count)
    fraction = None if memory_fraction is None else _read_fraction(memory_fraction)
    return Settings(fraction, memory_limit_mb, counts.get("GPU"), counts.get("CPU"))


def _read_fraction(value: Any) -> float:
    try:
        fraction = 0.0 if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise DeviceError(
            f"memory_fraction={value!r} cannot be used.",
            why="it is a share of a device's memory: above 0, and at most 1.",
            do="write for example memory_fraction=0.8, or give megabytes: memory_limit_mb=1024.",
        )
    return fraction


def _read_device_count(given: Any) -> dict[str, int]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise DeviceError(
            f"device_count={given!r} cannot be used.",
            why="it says how many devices of each kind count.",
            do='write for example device_count={"GPU": 1, "CPU": 4}; devices=4 is the number of workers.',
        )
    counts: dict[str, int] = {}
    for kind, count in given.items():
        name = kind.upper() if isinstance(kind, str) else kind
        if name not in _KINDS or name in counts:
            raise DeviceError(
                f"device_count={dict(given)!r}: {kind!r} cannot be used.",
                why=f"the kinds are {' and '.join(_KINDS)}, each once.",
                do='write for example device_count={"GPU": 1, "CPU": 4}.',
            )
        is_none_meant = name == "GPU" and type(count) is int and count == 0
        counts[name] = 0 if is_none_meant else read_count(count, f"device_count[{kind!r}]", most=MAX_SLICES)
    return counts


def keep_first_gpus(inventory: Inventory, num_gpus: int | None) -> Inventory:
    """What is left to choose from, with a note where more were counted on than are here."""
    if num_gpus is None:
        return inventory
    gpus = inventory.of_kind("gpu")
    rest = tuple(device for device in inventory.devices if device not in gpus[num_gpus:])
    notes = inventory.notes
    if num_gpus > len(gpus):
        notes = (*notes, f'device_count={{"GPU": {num_gpus}}}: {say_count(len(gpus), "GPU")} here')
    return Inventory(rest, notes, inventory.problems)


def limit_devices(devices: Sequence[Device], settings: Settings) -> tuple[Device, ...]:
    """The same devices with their memory limits.

    A virtual device's own memory, of which a fraction is taken, is its limit, or else an equal part of what it is
    cut from: two workers with 0.8 of one card each would not fit on it.
    """
    if settings.memory_fraction is None and settings.memory_limit_mb is None:
        return tuple(devices)
    neighbours = Counter((device.kind, device.index) for device in devices)
    limited = tuple(_limit(device, settings, neighbours[device.kind, device.index]) for device in devices)
    for device in limited:
        asked_mb = (device.memory_limit_mb or 0) * neighbours[device.kind, device.index]
        if settings.memory_limit_mb is not None and device.total_mb is not None and asked_mb > device.total_mb:
            raise DeviceError(
                f"memory_limit_mb={settings.memory_limit_mb} does not fit on {device}.",
                why=f"{say_count(neighbours[device.kind, device.index], 'worker')} would take {asked_mb} MB there, and"
                f" it has {device.total_mb} MB in all.",
                do="ask for less.",
            )
    return limited


def _limit(device: Device, settings: Settings, num_neighbours: int) -> Device:
    if settings.memory_limit_mb is not None:
        if device.memory_limit_mb is not None:
            raise DeviceError(
                f"{device} has a limit of {device.memory_limit_mb} MB already, and memory_limit_mb="
                f"{settings.memory_limit_mb} is another one.",
                do="give the limit once: in virtual_devices, or here.",
            )
        return replace(device, memory_limit_mb=settings.memory_limit_mb)
    own_mb = device.memory_limit_mb or (None if device.total_mb is None else device.total_mb // num_neighbours)
    if own_mb is None:
        raise DeviceError(
            f"memory_fraction={settings.memory_fraction} of {device} cannot be worked out.",
            why="nothing here says how much memory it has.",
            do="give megabytes: memory_limit_mb=1024.",
        )
    return replace(device, memory_limit_mb=max(1, int(own_mb * (settings.memory_fraction or 1))))
