"""What a run consists of, decided once, before any worker starts."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from duoka.devices.device import Device


@dataclass(frozen=True)
class Plan:
    devices: tuple[Device, ...]
    num_replicas: int
    threads: int
    seed: int = 0
    deadline_s: float = 60.0
    notes: tuple[str, ...] = ()  # what was chosen, and why, in sentences
    origin: str = "script"  # who chose the devices: the script, or the command line, which wins

    @property
    def num_workers(self) -> int:
        return len(self.devices)

    def to_json(self) -> str:
        fields: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps(fields | {"devices": [device.to_json() for device in self.devices]})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        fields = json.loads(text)
        fields["devices"] = tuple(Device.from_json(device) for device in fields["devices"])
        fields["notes"] = tuple(fields["notes"])
        return cls(**fields)


def threads_per_worker(num_replicas: int, cores: int, given: int | None) -> int:
    """Cores divided by *replicas*, so that the number does not depend on how many workers there are.

    The number of threads changes the bits of a matrix product; the number of workers must not.

    >>> threads_per_worker(4, cores=2, given=None), threads_per_worker(2, cores=8, given=None)
    (1, 4)
    """
    return given if given else max(1, cores // num_replicas)
