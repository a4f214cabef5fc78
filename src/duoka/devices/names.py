"""Names of devices, in every dialect people paste."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from duoka.errors import DeviceError

if TYPE_CHECKING:
    from duoka.devices.device import Device

KINDS = ("cpu", "gpu")
ALIASES = {"cuda": "gpu"}
OTHER_KINDS = ("hpu", "mps", "npu", "rocm", "tpu", "xla", "xpu")  # real ones, which Duoka cannot compute on

_TASK = re.compile(r"(?:/job:(?P<job>[^/]+))?(?:/replica:[0-9]+)?(?:/task:(?P<task>[0-9]+))?(?P<device>/.*)")
_DEVICE = re.compile(
    r"(?:/?device:|/)?(?P<kind>[a-z]+)"
    r"(?::(?P<index>[0-9]{1,6})|\((?P<bracketed>[0-9]{1,6})\))?"
    r"(?:/v(?P<virtual>[0-9]{1,6}))?"
)


@dataclass(frozen=True)
class DeviceName:
    """What a name says: a kind, a number, and the slice if the device is virtual."""

    kind: str
    index: int = 0
    virtual: int | None = None

    def __str__(self) -> str:
        whole = f"{self.kind}:{self.index}"
        return whole if self.virtual is None else f"{whole}/v{self.virtual}"


def parse(text: str, known: Sequence[Device] = ()) -> DeviceName:
    """Read a device name, or raise an error that lists the devices in ``known``.

    Upper and lower case are the same, and a name without a number means number 0.
    That such a device exists is not promised: `virtual.choose` looks for it.

    >>> str(parse("/job:localhost/replica:0/task:0/device:GPU:1"))
    'gpu:1'
    >>> [str(parse(text)) for text in ("cuda:3", "gpu(3)", "/gpu:3", "CPU", "cpu:0/v2")]
    ['gpu:3', 'gpu:3', 'gpu:3', 'cpu:0', 'cpu:0/v2']
    """
    if not isinstance(text, str):
        raise DeviceError(
            f"{text!r} is not the name of a device.",
            why="a name is a text such as 'gpu:0'; a number alone means how many devices.",
            do=f"write {_suggest(text)}. {say_what_is_here(known)}",
        )
    match = _DEVICE.fullmatch(_drop_task(text.strip().lower(), text))
    kind = ALIASES.get(match["kind"], match["kind"]) if match else ""
    if kind in {*OTHER_KINDS, *(device.kind for device in known)}:
        refuse_other_kind(kind, text, known)
    if match is None or kind not in KINDS:
        raise DeviceError(
            f"{text!r} is not the name of a device.",
            why="a name is a kind and a number: gpu:0, cuda:0, gpu(0), /gpu:0, /device:GPU:0, cpu, cpu:0.",
            do=say_what_is_here(known) or "write for example gpu:0 or cpu:0.",
        )
    number = match["index"] or match["bracketed"] or "0"
    return DeviceName(kind, int(number), None if match["virtual"] is None else int(match["virtual"]))


def refuse_other_kind(kind: str, asked: object, known: Iterable[Device] = ()) -> None:
    """Raise an error for a kind of device that Duoka does not drive: it would compute on the CPU without a word."""
    if kind not in KINDS:
        raise DeviceError(
            f"{str(asked)!r} cannot be used.",
            why=f"Duoka computes on CPUs and NVIDIA GPUs; it does not support devices of the kind {kind!r}.",
            do=f"pass a GPU or the CPU. {say_what_is_here(device for device in known if device.kind in KINDS)}",
        )


def say_what_is_here(known: Iterable[Device]) -> str:
    """The sentence that ends every error about a wrong name; empty when nothing is known."""
    names = ", ".join(device.name for device in known)
    return f"Here are: {names}." if names else ""


def _drop_task(text: str, original: str) -> str:
    """Strip TensorFlow's /job:localhost/replica:0/task:0, which says "this process"."""
    match = _TASK.fullmatch(text)
    if match is None or (match["job"] is None and match["task"] is None):
        return text
    # Reading past another task's name would quietly use a card of this machine instead of that one's.
    if match["job"] not in (None, "localhost") or int(match["task"] or 0) != 0:
        raise DeviceError(
            f"{original!r} names a device of another process.",
            why="a job other than localhost, or a task other than 0, may be another machine.",
            do=f"name the device as its own machine does: {match['device']}.",
        )
    return match["device"]


def _suggest(value: object) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return f"'gpu:{value}'" if is_number else "'gpu:0' or 'cpu:0'"
