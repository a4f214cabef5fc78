"""What a run consists of, decided once, before any worker starts."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from duoka.devices.device import Device
from duoka.errors import LaunchError
from duoka.runtime.rehearsal.settings import Rehearsal

_DEVICES = ("devices", "here")


@dataclass(frozen=True)
class Plan:
    devices: tuple[Device, ...]
    num_replicas: int
    threads: int
    seed: int = 0
    deadline_s: float = 60.0
    notes: tuple[str, ...] = ()  # what was chosen, and why, in sentences
    transport: str = "shm"  # what carries PyTorch's tensors: "shm", "gloo" or "nccl"
    command_line: tuple[str, ...] = ()  # what was given there: it wins over the script
    here: tuple[Device, ...] = ()  # all that could be chosen from: a worker is shown its own card only
    allow_growth: bool | None = None  # of what a framework takes of a card
    logical_cpus: int | None = None  # for TensorFlow
    respawn: bool = False  # new workers take the place of lost ones
    snapshot_s: float | None = None  # between two snapshots in memory, at least; None: none are taken
    hides_cards: bool = False  # device_count leaves some out: frameworks are not to see them
    rehearsal: Rehearsal | None = None  # of a run that `duoka rehearse` starts

    @property
    def num_workers(self) -> int:
        return len(self.devices)

    @property
    def takes_snapshots(self) -> bool:
        return self.snapshot_s is not None and self.respawn and self.num_workers > 1

    @property
    def needs_supervisor(self) -> bool:
        """Whether there is something to set before user code runs, or more than one replica."""
        settings = (self.devices[0].memory_limit_mb, self.allow_growth, self.logical_cpus)
        return self.num_replicas > 1 or self.hides_cards or any(setting is not None for setting in settings)

    def to_json(self) -> str:
        fields: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["rehearsal"] = None if self.rehearsal is None else self.rehearsal.to_json()
        return json.dumps(fields | {name: [device.to_json() for device in fields[name]] for name in _DEVICES})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        fields = json.loads(text)
        for name in _DEVICES:
            fields[name] = tuple(Device.from_json(device) for device in fields[name])
        for name in ("notes", "command_line"):
            fields[name] = tuple(fields[name])
        if fields["rehearsal"] is not None:
            fields["rehearsal"] = Rehearsal.from_json(fields["rehearsal"])
        return cls(**fields)


def threads_per_worker(num_replicas: int, cores: int, given: int | None) -> int:
    """Cores divided by *replicas*, so that the number does not depend on how many workers there are.

    The number of threads changes the bits of a matrix product; the number of workers must not.

    >>> threads_per_worker(4, cores=2, given=None), threads_per_worker(2, cores=8, given=None)
    (1, 4)
    """
    return given if given else max(1, cores // num_replicas)


def choose_transport(devices: Sequence[Device], asked: str | None) -> str:
    """What carries PyTorch's tensors: NCCL where each worker has a card of its own, else shared memory.

    >>> choose_transport([Device("gpu", 0), Device("gpu", 1)], asked=None)
    'nccl'
    >>> choose_transport([Device("cpu", 0, virtual=0), Device("cpu", 0, virtual=1)], asked="torch")
    'gloo'
    """
    cards = {device.index for device in devices if device.kind == "gpu"}
    library = None
    if len(cards) == len(devices):
        library = "nccl"
    elif all(device.kind == "cpu" for device in devices):
        library = "gloo"
    if asked == "torch" and library is None:
        names = ", ".join(device.name for device in devices)
        raise LaunchError(
            f"DUOKA_TRANSPORT=torch cannot be used with {names}.",
            why="torch.distributed connects CPU devices (Gloo), or cards of which each has one worker (NCCL).",
            do="use devices of one kind and each card once, or unset DUOKA_TRANSPORT.",
        )
    is_used = asked == "torch" or (asked is None and library == "nccl")
    return library if library is not None and is_used else "shm"


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


def read_flag(value: object, argument: str, *, can_be_none: bool = False) -> None:
    """True or False, and nothing that merely counts as one of them: `exact="no"` would be True."""
    if not (isinstance(value, bool) or (can_be_none and value is None)):
        expected = "True, False or None" if can_be_none else "True or False"
        raise LaunchError(f"{argument}={value!r} cannot be used.", why=f"it must be {expected}.")


def read_seconds(value: object, argument: str) -> float:
    """A duration as the user gave it, not longer than a week, which is as good as infinity."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds > 0:
        raise LaunchError(f"{argument}={value!r} cannot be used.", why="it must be a number of seconds above 0.")
    return min(seconds, 7 * 24 * 3600.0)
