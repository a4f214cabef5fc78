"""`log_placement=True`: where variables lie and operations ran, as one table, after the first step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from duoka.collectives.collective import Collective
from duoka.devices.device import Device
from duoka.devices.names import parse
from duoka.devices.table import align
from duoka.errors import DeviceError
from duoka.strategies.strategy import Options

_HEADINGS = ("what", "name", "of", "device")


@dataclass(frozen=True)
class Row:
    what: str  # "variable", "operations" or "program"
    name: str
    of: str  # its type and shape; or which operations they are
    device: str  # as the framework writes it


class PlacementLog:
    """Shows one table, on the main worker."""

    def __init__(self, device: Device, is_main: Callable[[], bool], *, is_only_card: bool) -> None:
        self._device, self._is_main, self._is_only_card = device, is_main, is_only_card
        self._is_done = False

    @property
    def is_wanted(self) -> bool:
        """Whether the table is still to come, from this worker: only then it is worth looking."""
        return not self._is_done and self._is_main()

    def show(self, rows: Iterable[Row]) -> None:
        if self.is_wanted:
            self._is_done = True
            cells = [
                (row.what, row.name, row.of, name_device(row.device, self._device, self._is_only_card)) for row in rows
            ]
            lines = ["placement of the first step:", *align([_HEADINGS, *cells])]
            print("\n".join(f"duoka: {line}" for line in lines), file=sys.stderr, flush=True)


def make_placement_log(collective: Collective, device: Device, options: Options) -> PlacementLog | None:
    """Where it was asked for."""
    if not options.log_placement:
        return None
    return PlacementLog(device, lambda: collective.worker == collective.main, is_only_card=options.sees_only_its_card)


def name_device(native: str, own: Device, is_only_card: bool) -> str:
    """Our name of a device that a framework names. A worker's only card is the framework's first.

    >>> name_device("/job:localhost/replica:0/task:0/device:GPU:0", Device("gpu", 2), is_only_card=True)
    'gpu:2'
    >>> name_device("cpu", Device("cpu", 0, virtual=1), is_only_card=True)
    'cpu:0/v1'
    """
    try:
        name = parse(native, [own])
    except DeviceError:
        return native
    index = own.index if is_only_card and name.index == 0 else name.index
    return own.name if (name.kind, index) == (own.kind, own.index) else str(name)


def list_kinds(kinds: Sequence[str], most: int = 4) -> str:
    """How many operations, and of which kinds.

    >>> list_kinds(["MatMul", "Relu", "MatMul"])
    '3: MatMul, Relu'
    """
    distinct = list(dict.fromkeys(kinds))
    rest = ", ..." if len(distinct) > most else ""
    return f"{len(kinds)}: {', '.join(distinct[:most])}{rest}"
