"""What is said about settings that a framework does not know, or does not take any more."""

from __future__ import annotations

import sys

from duoka.devices.device import Device
from duoka.errors import DeviceError


def too_late(framework: str, device: Device, logical_cpus: int | None, allow_growth: bool | None) -> DeviceError:
    """The error about a framework that has computed something before it could be told."""
    asked = {
        f'device_count={{"CPU": {logical_cpus}}}': logical_cpus is not None,
        f"a limit of {device.memory_limit_mb} MB on {device}": device.memory_limit_mb is not None,
        f"allow_growth={allow_growth}": allow_growth is not None,
    }
    settings = " and ".join(text for text, is_asked in asked.items() if is_asked)
    return DeviceError(
        f"It is too late for {settings}: {framework} has started.",
        why=f"{framework} fixes its devices, and their memory, with its first operation.",
        do="make the strategy at the top, before any tensor, variable or model; in a notebook, restart it first;"
        " or put the code into a script, whose workers are told before it runs.",
    )


def say_no_meaning(framework: str, logical_cpus: int) -> None:
    """The first worker says it for all."""
    print(
        f'duoka: device_count={{"CPU": {logical_cpus}}} has no meaning for {framework}:'
        " only TensorFlow makes several devices of one CPU",
        file=sys.stderr,
        flush=True,
    )
