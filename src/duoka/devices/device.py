"""A device: the place where one worker computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from duoka.devices.names import DeviceName

MB = 2**20  # Like the frameworks and nvidia-smi, we count memory in binary megabytes.


class Holder(NamedTuple):
    """A process that holds memory of a device; ``mb`` is None where the driver will not say how much."""

    pid: int
    name: str
    mb: int | None


@dataclass(frozen=True)
class Device:
    """A device, or a virtual one cut out of it.

    Two are equal when they are the same place with the same memory limit; what else is known
    about the place (its title, its free memory) changes by the minute and is not compared.

    >>> Device("cpu", 0, virtual=2).name
    'cpu:0/v2'
    """

    kind: str
    index: int = 0
    virtual: int | None = None
    memory_limit_mb: int | None = None
    title: str = field(default="", compare=False)
    cores: int | None = field(default=None, compare=False)
    physical_index: int | None = field(default=None, compare=False)
    uuid: str | None = field(default=None, compare=False)
    total_mb: int | None = field(default=None, compare=False)
    free_mb: int | None = field(default=None, compare=False)
    holders: tuple[Holder, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """The name users write: "gpu:0", or "cpu:0/v2" for a virtual device. `names.parse` reads it back."""
        return str(DeviceName(self.kind, self.index, self.virtual))

    def __str__(self) -> str:
        return self.name

    def to_json(self) -> dict[str, Any]:
        """Everything known, as strict JSON values; `from_json` gives an equal device."""
        values = asdict(self)
        values["holders"] = [{"pid": pid, "name": name, "mb": mb} for pid, name, mb in self.holders]
        return {"name": self.name, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Device:
        """The device that `to_json` wrote down."""
        fields = {key: value for key, value in values.items() if key != "name"}
        holders = tuple(Holder(**holder) for holder in fields.pop("holders", ()))
        return cls(**fields, holders=holders)


def make_printable(text: str) -> str:
    """Text from outside, safe to print: a process may put terminal escapes or broken bytes in its name."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
