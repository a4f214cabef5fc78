"""What is here, and why the rest is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from duoka.devices.cpu import list_cpus
from duoka.devices.cuda import probe_gpus
from duoka.devices.device import Device

EXAMPLE_COUNT = 4


@dataclass(frozen=True)
class Inventory:
    """The devices of this machine, GPUs first, and notes on what one might miss among them.

    ``problems`` says why GPUs that exist cannot be used; it is empty if the user has hidden all of them.
    """

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> list[Device]:
        return [device for device in self.devices if device.kind == kind]


def list_devices(environ: Mapping[str, str], extra: Iterable[Device] = (), nvml: Any = None) -> Inventory:
    """Look at this machine without loading a framework or starting anything on a card.

    ``extra`` are devices that an already imported framework knows of; those found here
    too are kept as they are found here, because NVML knows more about them.
    """
    cards = probe_gpus(environ, nvml)
    found = {(device.kind, device.index): device for device in [*cards.devices, *list_cpus()]}
    for device in extra:
        found.setdefault((device.kind, device.index), device)
    ranks = {"gpu": 0, "cpu": 2}
    devices = sorted(found.values(), key=lambda device: (ranks.get(device.kind, 1), device.kind, device.index))
    has_hidden_all = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return Inventory(tuple(devices), cards.notes, () if has_hidden_all else cards.problems)


def summary_sentence(inventory: Inventory) -> str:
    """One plain sentence: what is here and what a strategy will make of it.

    >>> summary_sentence(Inventory((Device("cpu", 0, cores=2),)))
    '0 GPUs, 2 CPU cores: `Mirrored(devices=4)` will use 4 virtual CPU devices'
    """
    gpus = inventory.of_kind("gpu")
    others = sorted({device.kind for device in inventory.devices} - {"gpu", "cpu"})
    parts = [say_count(len(gpus), "GPU")]
    parts += [say_count(len(inventory.of_kind(kind)), f"{kind.upper()} device") for kind in others]
    parts.append(say_count(sum(device.cores or 0 for device in inventory.of_kind("cpu")), "CPU core"))
    if gpus:
        outcome = f"`Mirrored()` will use {join_names(gpus)}"
    elif inventory.problems:
        outcome = f"`Mirrored(devices={EXAMPLE_COUNT})` will raise an error, because an NVIDIA GPU does not work"
    else:
        outcome = f"`Mirrored(devices={EXAMPLE_COUNT})` will use {EXAMPLE_COUNT} virtual CPU devices"
    return f"{', '.join(parts)}: {outcome}"


def join_names(devices: Sequence[Device]) -> str:
    """Names as one says them.

    >>> join_names([Device("gpu", 0), Device("gpu", 1)])
    'gpu:0 and gpu:1'
    >>> join_names([Device("gpu", index) for index in range(8)])
    'gpu:0 to gpu:7'
    """
    names = [device.name for device in devices]
    first = devices[0]
    is_range = all(device == Device(first.kind, first.index + place) for place, device in enumerate(devices))
    if len(names) > 2 and is_range:
        return f"{names[0]} to {names[-1]}"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def say_count(number: int, noun: str) -> str:
    """A number and its noun: "1 GPU", "2 GPUs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
