"""The CPU of this machine: one device, however many cores it has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from duoka.devices.cgroup import read_group_memory
from duoka.devices.device import MB, Device, Holder, make_printable

NUM_HOLDERS = 3


def list_cpus(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> list[Device]:
    """One device, cpu:0, with the cores this process may use and the memory its container leaves it."""
    total, free = _read_usable_memory(proc, cgroup)
    return [
        Device(
            "cpu",
            0,
            title=_read_model(proc),
            cores=count_usable_cores(),
            total_mb=total // MB,
            free_mb=free // MB,
            holders=_list_holders(proc),
        )
    ]


def available_bytes() -> int:
    """What can still be allocated on this machine, within the limits of its container."""
    return _read_usable_memory(Path("/proc"), Path("/sys/fs/cgroup"))[1]


def _read_usable_memory(proc: Path, cgroup: Path) -> tuple[int, int]:
    total, free = _read_memory(proc)
    groups = read_group_memory(proc, cgroup)
    # Without a limit a group says 2**63: the smallest number is the one that holds.
    total = min([total, *(group.limit_bytes for group in groups)])
    free = min([free, *(group.free_bytes for group in groups)])
    return total, min(free, total)


def count_usable_cores() -> int:
    """The cores this process may run on: under taskset or in a container, fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_memory(proc: Path) -> tuple[int, int]:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        values = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in lines)}
        return values["MemTotal"], values["MemAvailable"]
    except (OSError, KeyError):
        import psutil  # Only on systems without /proc: importing it takes longer than all of this.

        memory = psutil.virtual_memory()
        return memory.total, memory.available


def _read_model(proc: Path) -> str:
    try:
        with (proc / "cpuinfo").open() as lines:
            for line in lines:
                if line.startswith("model name"):
                    return make_printable(line.split(":", 1)[1].strip())
    except OSError:
        pass
    return "CPU"


def _list_holders(proc: Path) -> tuple[Holder, ...]:
    """The other processes with the most resident memory, the largest first."""
    # Read by hand: psutil took 66 us a process, this 15, and servers have thousands.
    largest = sorted(_list_resident(proc), reverse=True)[:NUM_HOLDERS]
    return tuple(Holder(pid, _read_process_name(proc, pid), resident // MB) for resident, pid in largest)


def _list_resident(proc: Path) -> Iterator[tuple[int, int]]:
    page_size = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
    try:
        entries = os.listdir(proc)
    except OSError:
        return
    for entry in entries:
        if entry.isdecimal() and int(entry) != os.getpid():
            try:
                with open(f"{proc}/{entry}/statm", "rb") as file:
                    yield int(file.read().split()[1]) * page_size, int(entry)
            except (OSError, IndexError):  # It ended while we were reading.
                continue


def _read_process_name(proc: Path, pid: int) -> str:
    try:
        return make_printable((proc / str(pid) / "comm").read_text(errors="replace").strip())
    except OSError:
        return "unknown"
