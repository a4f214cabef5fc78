"""Where `duoka.device(name)` leads: to the device of that name, or to the one that takes its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from duoka.devices.device import Device
from duoka.devices.names import DeviceName, parse, refuse_other_kind, say_what_is_here
from duoka.errors import DeviceError


@dataclass(frozen=True)
class Place:
    """A device, and what is to be said where it is not the one that was named."""

    device: Device
    note: str = ""


def find_place(
    asked: str | Device, here: Sequence[Device], own: Device | None = None, *, soft_placement: bool = True
) -> Place:
    """Find a device among those of this machine, as a process alone sees them, or a worker whose device is ``own``.

    A worker computes on its own device and on the CPU, and sees no other.

    >>> find_place("/gpu:2", [Device("cpu")]).note
    'gpu:2 is not here: what is placed there runs on cpu:0'
    """
    if isinstance(asked, Device):
        refuse_other_kind(asked.kind, asked, here)
    name = DeviceName(asked.kind, asked.index, asked.virtual) if isinstance(asked, Device) else parse(asked, here)
    found = next((device for device in here if (device.kind, device.index) == (name.kind, name.index)), None)
    if own is not None and _is_part_of(own, name):
        return Place(own)
    if found is not None and (own is None or (name.kind == "cpu" and name.virtual is None)):
        if own is not None and own.kind == "cpu" and name.index == own.index:
            return Place(own)
        return Place(found if name.virtual is None else replace(found, virtual=name.virtual))
    if found is not None and own is not None:
        stand_in, what = own, f"{name} is not this worker's device"
    else:
        stand_in = next((device for device in here if device.kind == "cpu"), Device("cpu"))
        what = f"{name} is not here"
        if own is not None and own.kind == "cpu":
            stand_in = own
    if not soft_placement:
        raise DeviceError(
            f"{what}.",
            why=f"soft_placement=False forbids {stand_in} in its place.",
            do=f"name another, or leave soft_placement on. {_say_what_can_be_used(here, own)}",
        )
    return Place(stand_in, f"{what}: what is placed there runs on {stand_in}")


def _is_part_of(own: Device, name: DeviceName) -> bool:
    return (own.kind, own.index) == (name.kind, name.index) and name.virtual in (None, own.virtual)


def _say_what_can_be_used(here: Sequence[Device], own: Device | None) -> str:
    if own is None:
        # A logical device of TensorFlow may have the name of the whole: say it once.
        return say_what_is_here(list({device.name: device for device in here}.values()))
    cpus = [] if own.kind == "cpu" else [device for device in here if device.kind == "cpu"]
    return say_what_is_here([own, *cpus])
