"""The memory a container may use: control groups, version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class GroupMemory:
    """What one control group allows, and how much of that could still be had."""

    limit_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class _Version:
    limit: str
    used: str
    reclaimable: str


_VERSION_1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Version("memory.max", "memory.current", "inactive_file")


def read_group_memory(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> list[GroupMemory]:
    """Every limit on this process: its own group's and those of all groups above it. Often none."""
    found = []
    for folder, version in _list_groups(proc, root):
        memory = _read_group(folder, version)
        if memory is not None:
            found.append(memory)
    return found


def _list_groups(proc: Path, root: Path) -> Iterator[tuple[Path, _Version]]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mounts, version = [root / "memory"], _VERSION_1
        elif controllers == "":
            mounts, version = [root, root / "unified"], _VERSION_2
        else:
            continue
        # Inside a container the path may be the host's and not visible: then only the mount itself answers,
        # and that is the container's own group. Missing files are passed over.
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:depth]), version


def _read_group(folder: Path, version: _Version) -> GroupMemory | None:
    try:
        limit = int((folder / version.limit).read_text())  # "max", no limit, is a ValueError
        used = int((folder / version.used).read_text())
        statistics = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # Cached files count as used, but the kernel gives them up before it kills anybody.
    reclaimable = int(statistics.get(version.reclaimable, 0))
    return GroupMemory(limit, max(0, limit - used + reclaimable))
