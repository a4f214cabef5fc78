"""NVIDIA cards, asked through NVML: no CUDA context is made and no memory is taken."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from duoka.devices.device import MB, Device, Holder, make_printable
from duoka.devices.visible import select_visible

DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))

PCI_DEVICES = Path("/sys/bus/pci/devices")

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Cards:
    """The GPUs this process may use, notes on the rest, and why GPUs that exist cannot be used."""

    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def list_gpus(environ: Mapping[str, str], nvml: Any = None) -> list[Device]:
    """The NVIDIA cards that CUDA_VISIBLE_DEVICES leaves, numbered as CUDA numbers them."""
    return list(probe_gpus(environ, nvml).devices)


def probe_gpus(environ: Mapping[str, str], nvml: Any = None) -> Cards:
    """Like `list_gpus`, with notes on what is missing. ``nvml`` is pynvml or something that behaves like it.

    A card stays in the list when the driver refuses to say something about it: that value is None.
    """
    if nvml is None:
        if not any(file.exists() for file in DRIVER_FILES):
            if _is_on_the_bus(PCI_DEVICES):
                return _unusable("an NVIDIA GPU is on the PCI bus, but no NVIDIA driver is loaded")
            return Cards(notes=("no NVIDIA driver is loaded",))
        try:
            nvml = importlib.import_module("pynvml")  # Only with a driver: elsewhere 30 ms for nothing.
        except ImportError:
            return _unusable("an NVIDIA driver is loaded, but nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _unusable(f"an NVIDIA driver is loaded, but does not answer: {error}")
    try:
        return _Probe(nvml).list_cards(environ)
    except nvml.NVMLError as error:
        return _unusable(f"the NVIDIA driver did not list its GPUs: {error}")
    finally:
        nvml.nvmlShutdown()


def _unusable(problem: str) -> Cards:
    return Cards(notes=(problem,), problems=(problem,))


def _is_on_the_bus(devices: Path) -> bool:
    """Whether Linux lists a display controller of NVIDIA, driver or not."""
    for device in devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == "0x10de" and kind.startswith("0x03"):
                return True
        except OSError:
            continue
    return False


class _Probe:
    """One visit to NVML, between its init and its shutdown."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.notes: list[str] = []
        self.problems: list[str] = []

    def list_cards(self, environ: Mapping[str, str]) -> Cards:
        handles = self._open_cards()
        visible = select_visible(
            environ.get("CUDA_VISIBLE_DEVICES"),
            [self._ask(self._uuid, handle) for handle in handles.values()],
        )
        self.notes += visible.notes
        self._check_order(environ, list(handles.values()))
        devices: list[Device] = []
        physical_numbers = list(handles)
        for card in visible.cards:
            if isinstance(card, str):
                device = self._describe_instance(len(devices), card)
                if device is None:
                    break  # CUDA, too, stops reading at a name it does not know.
            else:
                number = physical_numbers[card]
                device = self._describe(len(devices), number, handles[number])
            devices.append(device)
        return Cards(tuple(devices), (*self.problems, *self.notes), tuple(self.problems))

    def _open_cards(self) -> dict[int, Any]:
        """Handles by physical number; a card that has fallen off the bus is noted and left out."""
        handles = {}
        for number in range(self.nvml.nvmlDeviceGetCount()):
            try:
                handles[number] = self.nvml.nvmlDeviceGetHandleByIndex(number)
            except self.nvml.NVMLError as error:
                self.problems.append(f"physical GPU {number} does not answer: {error}")
        return handles

    def _describe(self, index: int, physical_index: int | None, handle: Any) -> Device:
        memory = self._ask(self.nvml.nvmlDeviceGetMemoryInfo, handle)
        self._note_instances(index, handle)
        return Device(
            "gpu",
            index,
            title=self._ask(self._title, handle) or "NVIDIA GPU",
            physical_index=physical_index,
            uuid=self._ask(self._uuid, handle),
            total_mb=None if memory is None else memory.total // MB,
            free_mb=None if memory is None else memory.free // MB,
            holders=self._list_holders(handle),
        )

    def _describe_instance(self, index: int, name: str) -> Device | None:
        """A slice of a card made by MIG, found by its name; the physical number is that of the whole card."""
        handle = self._ask(self.nvml.nvmlDeviceGetHandleByUUID, name)
        if handle is None:
            self.notes.append(f"CUDA_VISIBLE_DEVICES: {name} is not here, and CUDA stops reading there")
            return None
        if index == 1:
            self.notes.append("CUDA lets one process use one MIG instance: each worker gets its own")
        parent = self._ask(self.nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        number = None if parent is None else self._ask(self.nvml.nvmlDeviceGetIndex, parent)
        return self._describe(index, number, handle)

    def _note_instances(self, index: int, handle: Any) -> None:
        mode = self._ask(self.nvml.nvmlDeviceGetMigMode, handle)
        if not mode or not mode[0]:
            return
        count = self._ask(self.nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        handles = [self._ask(self.nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot) for slot in range(count)]
        names = [self._ask(self._uuid, instance) for instance in handles if instance is not None]
        listed = ", ".join(name for name in names if name) or "none is set up"
        self.notes.append(f"gpu:{index} is split by MIG; choose instances with CUDA_VISIBLE_DEVICES: {listed}")

    def _list_holders(self, handle: Any) -> tuple[Holder, ...]:
        used: dict[int, int | None] = {}
        for question in (
            self.nvml.nvmlDeviceGetComputeRunningProcesses,
            self.nvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            for process in self._ask(question, handle) or ():
                used[process.pid] = process.usedGpuMemory
        largest = sorted(used.items(), key=lambda item: (-(item[1] or 0), item[0]))
        return tuple(
            Holder(pid, self._name_process(pid), None if size is None else size // MB) for pid, size in largest
        )

    def _name_process(self, pid: int) -> str:
        # By the driver: its process numbers are the host's, and /proc in a container knows others.
        name = self._ask(self.nvml.nvmlSystemGetProcessName, pid)
        return make_printable(os.path.basename(_to_text(name).split("\0")[0])) if name else "unknown"

    def _check_order(self, environ: Mapping[str, str], handles: list[Any]) -> None:
        titles = {self._ask(self._title, handle) for handle in handles}
        if len(titles) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            # NVML counts along the bus, CUDA the fastest first: with unequal cards the numbers can differ.
            self.notes.append(
                "the cards differ and CUDA counts the fastest first: "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID to make its numbers the ones shown here"
            )

    def _title(self, handle: Any) -> str:
        return make_printable(_to_text(self.nvml.nvmlDeviceGetName(handle)))

    def _uuid(self, handle: Any) -> str:
        return _to_text(self.nvml.nvmlDeviceGetUUID(handle))

    def _ask(self, question: Callable[..., Answer], *arguments: Any) -> Answer | None:
        try:
            return question(*arguments)
        except self.nvml.NVMLError:
            return None


def _to_text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value  # bytes before pynvml 11.5
