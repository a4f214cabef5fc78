"""What lies in shared memory and belongs to no living process: what a run has left there.

Other programs on this machine use /dev/shm as well, and theirs come and go while a test runs.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_SHARED = Path("/dev/shm")


def list_abandoned() -> list[str]:
    """Names of our user's files there that nobody has open or mapped."""
    mine = [path for path in _SHARED.iterdir() if _is_ours(path)]
    held = _list_held() if mine else set()
    return sorted(path.name for path in mine if str(path) not in held and path.exists())


def _is_ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _list_held() -> set[str]:
    held: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone, or not ours
            lines = (process / "maps").read_text(errors="replace").splitlines()
            held |= {line[line.index("/") :] for line in lines if f"{_SHARED}/" in line}
            held |= {os.readlink(descriptor) for descriptor in (process / "fd").iterdir()}
    return held
