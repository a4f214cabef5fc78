"""What can compute here, and where: the functions on devices that need no strategy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

from duoka.devices.device import Device
from duoka.devices.finding import find_place
from duoka.devices.names import parse
from duoka.devices.probe import Inventory, list_devices
from duoka.devices.virtual import cut
from duoka.errors import DeviceError
from duoka.frameworks.extra_devices import list_extra_devices, list_logical_devices
from duoka.frameworks.placing import placing
from duoka.runtime.plan import read_flag
from duoka.runtime.run import say
from duoka.runtime.worker import attachment


def devices() -> list[Device]:
    """What can compute here: GPUs, the CPU, and what an already imported framework adds."""
    return list(list_here().devices)


def virtual_devices(device: str | Device, count: int | None = None, memory_mb: Any = None) -> list[Device]:
    """Cut a device into several, each with its own memory limit if one is given.

    >>> [part.name for part in virtual_devices("cpu:0", count=2)]
    ['cpu:0/v0', 'cpu:0/v1']
    """
    if isinstance(device, str):
        inventory = list_here()
        name = parse(device, inventory.devices)
        found = [d for d in inventory.devices if (d.kind, d.index) == (name.kind, name.index)]
        if not found:
            here = ", ".join(d.name for d in inventory.devices)
            raise DeviceError(f"There is no {device} to cut.", why=f"here are: {here}.", do="name one of these.")
        device = found[0]
    return cut(device, count, memory_mb)


def list_here() -> Inventory:
    """The devices of this machine; inside a run, those that were here when it was planned."""
    attached = attachment()
    if attached is not None:
        # What was here when the run was planned: the script, run again, must come to the same choice.
        return Inventory(attached.plan.here)
    return list_devices(os.environ, list_extra_devices())


_soft_placement = True  # as the newest strategy has it


def place_softly(is_soft: bool) -> None:
    """What `device` does from here on, unless it is told otherwise."""
    global _soft_placement
    _soft_placement = is_soft


@contextmanager
def device(name: str | Device, *, soft_placement: bool | None = None) -> Iterator[Device]:
    """What PyTorch, Keras, TensorFlow and JAX make in this block, they make on the device of that name.

    Every dialect of names is read. What is not here runs on the CPU, and another worker's device means this
    worker's own; either is said once, or is an error with ``soft_placement=False`` here or in the strategy.

    >>> with device("/cpu:0") as place:
    ...     print(place)
    cpu:0
    """
    is_soft = _soft_placement if soft_placement is None else soft_placement
    read_flag(is_soft, "soft_placement")
    attached = attachment()
    own = None if attached is None else attached.plan.devices[attached.worker]
    logical = list_logical_devices(["gpu", "cpu"] if own is None else ["cpu"])  # a worker's card has another name
    place = find_place(name, [*_devices_here(len(sys.modules)), *logical], own, soft_placement=is_soft)
    if place.note:
        _say_once(place.note)
    with placing(place.device, is_only_card=own is not None, soft_placement=is_soft, say=_say_once):
        yield place.device


@lru_cache(maxsize=1)
def _devices_here(num_modules: int) -> tuple[Device, ...]:
    """Looked for once, and again when something was imported: it takes milliseconds, and a loop may ask every step."""
    return list_here().devices


@cache
def _say_once(note: str) -> None:
    say(note)
