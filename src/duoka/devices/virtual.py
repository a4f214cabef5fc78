"""Virtual devices: one device cut into several; and the choice of devices for a run."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count as count_up

from duoka.devices.device import Device
from duoka.devices.names import DeviceName, parse, refuse_other_kind, say_what_is_here
from duoka.devices.probe import Inventory, join_names, say_count
from duoka.errors import DeviceError

MAX_SLICES = 1024  # Each becomes a process: devices=100000, a typo, would take the machine down.

Request = int | str | Device | Iterable[str | Device] | None


@dataclass(frozen=True)
class Choice:
    """The devices of a run, one per worker, and notes on every one that is not what was asked for."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()


def cut(device: Device, count: int | None = None, memory_mb: int | Sequence[int] | None = None) -> list[Device]:
    """Cut a device into virtual ones, each with its own memory limit if ``memory_mb`` is given.

    One number limits every slice to it; a list gives each slice its own, and says how many there are.

    >>> [part.name for part in cut(Device("cpu"), count=2)]
    ['cpu:0/v0', 'cpu:0/v1']
    >>> [part.memory_limit_mb for part in cut(Device("gpu"), memory_mb=[1024, 2048])]
    [1024, 2048]
    """
    if device.virtual is not None:
        raise DeviceError(
            f"{device} cannot be cut again.",
            why="it is a virtual device already.",
            do=f"cut {replace(device, virtual=None)} into more slices instead.",
        )
    limits = _read_limits(device, count, memory_mb)
    asked_mb = sum(limit or 0 for limit in limits)
    if device.total_mb is not None and asked_mb > device.total_mb:
        raise DeviceError(
            f"{device} cannot give {asked_mb} MB to {len(limits)} virtual devices.",
            why=f"it has {device.total_mb} MB in all.",
            do="ask for smaller limits, or for fewer virtual devices.",
        )
    return [replace(device, virtual=number, memory_limit_mb=limit) for number, limit in enumerate(limits)]


def choose(request: Request, inventory: Inventory, soft_placement: bool = True) -> Choice:
    """Decide which devices a run uses; the notes say what it got in place of what it asked for.

    Nothing asked: every GPU, or cpu:0 where there is none. A number: that many GPUs. Names: those.
    Missing GPUs become virtual CPU devices, unless ``soft_placement`` is False: then they are an error.
    """
    if request is None:
        return _choose_everything(inventory)
    if isinstance(request, str):
        text = request.strip()
        request = int(text) if re.fullmatch("-?[0-9]{1,9}", text) else text.split(",")
    if isinstance(request, Device):
        request = [request]
    if isinstance(request, Iterable):
        return _choose_named(list(request), inventory, soft_placement)
    return _choose_count(read_count(request, "devices", inventory), inventory, soft_placement)


def _choose_everything(inventory: Inventory) -> Choice:
    gpus = inventory.of_kind("gpu")
    if gpus:
        return Choice(tuple(gpus))
    others = [device for device in inventory.devices if device.kind != "cpu"]
    notes = [f"{join_names(others)} not used: Duoka computes on CPUs and NVIDIA GPUs"] if others else []
    return Choice((_find_cpu(inventory),), (*inventory.problems, *notes))


def _choose_count(num_devices: int, inventory: Inventory, soft_placement: bool) -> Choice:
    gpus = inventory.of_kind("gpu")
    if num_devices <= len(gpus):
        return Choice(tuple(gpus[:num_devices]))
    _refuse_unusable_gpus(f"devices={num_devices}", num_devices, inventory)
    if num_devices == 1:
        return Choice((_find_cpu(inventory),))
    here = f"{say_count(len(gpus), 'GPU')} here"
    if not soft_placement:
        raise DeviceError(
            f"devices={num_devices} needs {num_devices} GPUs; {here}.",
            why="soft_placement=False forbids virtual CPU devices in their place.",
            do=f"ask for fewer, or set soft_placement=True. {say_what_is_here(inventory.devices)}",
        )
    slices = cut(_find_cpu(inventory), num_devices)
    return Choice(tuple(slices), (f"{here}: devices={num_devices} uses {num_devices} virtual CPU devices",))


def _choose_named(asked: list[str | Device], inventory: Inventory, soft_placement: bool) -> Choice:
    if not asked:
        raise DeviceError(
            "devices=[] names no device.",
            why="a run needs at least one.",
            do=f"leave devices out to use every GPU. {say_what_is_here(inventory.devices)}",
        )
    found = [_find(one, inventory) for one in asked]
    names = [_name_of(one, inventory) for one in asked]
    _refuse_duplicates(names, inventory)
    missing = [str(name) for name, device in zip(names, found, strict=True) if device is None]
    if missing and not soft_placement:
        raise DeviceError(
            f"{' and '.join(missing)}: not here.",
            why="soft_placement=False forbids virtual CPU devices in their place.",
            do=f"name others, or set soft_placement=True. {say_what_is_here(inventory.devices)}",
        )
    if missing:
        _refuse_unusable_gpus(" and ".join(missing), len(missing), inventory)
    cpu = _find_cpu(inventory)
    taken = {name.virtual for name in names if (name.kind, name.index) == (cpu.kind, cpu.index)}
    free_numbers = (number for number in count_up() if number not in taken)
    devices: list[Device] = []
    notes = [note for one in asked for note in _note_vague_name(one, inventory)]
    for one, name, device in zip(asked, names, found, strict=True):
        if device is None:
            limit_mb = one.memory_limit_mb if isinstance(one, Device) else None
            device = replace(cpu, virtual=next(free_numbers), memory_limit_mb=limit_mb)
            notes.append(f"{name} is not here: {device}, a virtual CPU device, takes its place")
        devices.append(device)
    return Choice(tuple(devices), tuple(notes))


def _refuse_unusable_gpus(asked: str, num_devices: int, inventory: Inventory) -> None:
    """Virtual CPU devices stand in for GPUs that do not exist, not for GPUs that are broken."""
    if inventory.problems:
        raise DeviceError(
            f"{asked} cannot be used: this machine has an NVIDIA GPU that does not work.",
            why="; ".join(inventory.problems) + ".",
            do="make `nvidia-smi` work and start again. To train on the CPU, set CUDA_VISIBLE_DEVICES=-1 or pass"
            f' devices=duoka.virtual_devices("cpu:0", count={num_devices}).',
        )


def _find(asked: str | Device, inventory: Inventory) -> Device | None:
    """The device that is meant, or None for a GPU that is not here; a CPU has no stand-in."""
    name = _name_of(asked, inventory)
    for device in inventory.devices:
        if (device.kind, device.index) == (name.kind, name.index):
            return asked if isinstance(asked, Device) else replace(device, virtual=name.virtual)
    if name.kind == "gpu":
        return None
    raise DeviceError(
        f"{name} is not here.",
        why="all cores of a machine are one device, cpu:0.",
        do=say_what_is_here(inventory.devices),
    )


def _name_of(asked: str | Device, inventory: Inventory) -> DeviceName:
    if isinstance(asked, Device):
        refuse_other_kind(asked.kind, asked, inventory.devices)
        return DeviceName(asked.kind, asked.index, asked.virtual)
    return parse(asked, inventory.devices)


def _refuse_duplicates(names: list[DeviceName], inventory: Inventory) -> None:
    for name in names:
        times = names.count(name)
        if times > 1:
            raise DeviceError(
                f"{name} is named {times} times.",
                why="each worker has a device of its own.",
                do=f"write devices={times}, or devices=duoka.virtual_devices('{name}', count={times}). "
                + say_what_is_here(inventory.devices),
            )


def _note_vague_name(asked: str | Device, inventory: Inventory) -> list[str]:
    if isinstance(asked, Device) or any(letter.isdecimal() for letter in asked):
        return []
    others = inventory.of_kind(parse(asked, inventory.devices).kind)
    if len(others) < 2:
        return []
    return [f"{asked!r} means {others[0]} only; leave devices out to use all {len(others)}"]


def _find_cpu(inventory: Inventory) -> Device:
    cpus = inventory.of_kind("cpu")
    return cpus[0] if cpus else Device("cpu")


def _read_limits(device: Device, count: int | None, memory_mb: int | Sequence[int] | None) -> list[int | None]:
    if count is None and memory_mb is None:
        raise DeviceError(
            f"{device} cannot be cut without saying how.",
            why="neither count nor memory_mb is given.",
            do="write count=4, or memory_mb=[1024, 1024].",
        )
    num_slices = None if count is None else read_count(count, "count")
    if memory_mb is None or not isinstance(memory_mb, Iterable):
        limit = None if memory_mb is None else read_count(memory_mb, "memory_mb", most=None)
        return [limit] * (num_slices or 1)
    limits: list[int | None] = [read_count(limit, "memory_mb", most=None) for limit in memory_mb]
    if len(limits) != (num_slices or len(limits)) or not limits:
        raise DeviceError(
            f"count={count} and {len(limits)} limits in memory_mb do not fit together.",
            why="each virtual device takes one limit of the list.",
            do="leave count out, or give as many limits.",
        )
    return limits


def read_count(value: object, argument: str, inventory: Inventory | None = None, most: int | None = MAX_SLICES) -> int:
    """A whole number from 1 to ``most``; True and 2.0 are mistakes, numpy integers are not."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < 1 or (most is not None and number > most):
        raise DeviceError(
            f"{argument}={value!r} cannot be used.",
            why=f"it must be a whole number{' from 1' if most is None else f' from 1 to {most}'}.",
            do=say_what_is_here(inventory.devices if inventory else ()) or f"write for example {argument}=4.",
        )
    return number
