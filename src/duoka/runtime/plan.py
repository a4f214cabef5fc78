"""What a run consists of, decided once, before any worker starts."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from dataclasses import dataclass
from typing import Any

from duoka.devices.device import Device
from duoka.errors import LaunchError

_DEVICES = ("devices", "here")


@dataclass(frozen=True)
class Plan:
    devices: tuple[Device, ...]
    num_replicas: int
    threads: int
    seed: int = 0
    deadline_s: float = 60.0
    notes: tuple[str, ...] = ()  # what was chosen, and why, in sentences
    command_line: tuple[str, ...] = ()  # what was given there: it wins over the script
    here: tuple[Device, ...] = ()  # all that could be chosen from: a worker is shown its own card only

    @property
    def num_workers(self) -> int:
        return len(self.devices)

    def to_json(self) -> str:
        fields: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps(fields | {name: [device.to_json() for device in fields[name]] for name in _DEVICES})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        fields = json.loads(text)
        for name in _DEVICES:
            fields[name] = tuple(Device.from_json(device) for device in fields[name])
        for name in ("notes", "command_line"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def threads_per_worker(num_replicas: int, cores: int, given: int | None) -> int:
    """Cores divided by *replicas*, so that the number does not depend on how many workers there are.

    The number of threads changes the bits of a matrix product; the number of workers must not.

    >>> threads_per_worker(4, cores=2, given=None), threads_per_worker(2, cores=8, given=None)
    (1, 4)
    """
    return given if given else max(1, cores // num_replicas)


def read_whole_number(value: object, argument: str, least: int) -> int:
    """A whole number as the user gave it: NumPy's are welcome, True and 2.0 are mistakes.

    >>> read_whole_number(2.0, "replicas", least=1)
    Traceback (most recent call last):
        ...
    duoka.errors.LaunchError: replicas=2.0 cannot be used.
      why  it must be a whole number from 1 on.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number < 2**63:
        raise LaunchError(f"{argument}={value!r} cannot be used.", why=f"it must be a whole number from {least} on.")
    return number


def read_seconds(value: object, argument: str) -> float:
    """A duration as the user gave it, not longer than a week, which is as good as infinity."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds > 0:
        raise LaunchError(f"{argument}={value!r} cannot be used.", why="it must be a number of seconds above 0.")
    return min(seconds, 7 * 24 * 3600.0)
