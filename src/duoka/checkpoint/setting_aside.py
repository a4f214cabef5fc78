"""Checkpoints that no longer count are moved into a folder beside, and kept. Without NumPy: supervisors do it, too."""

from __future__ import annotations

import os

from duoka.checkpoint.disk import Disk, sync_folder
from duoka.checkpoint.locks import exclusive
from duoka.checkpoint.names import aside_name, list_places


def move_aside(disk: Disk, directory: str, above_step: int, deadline_s: float) -> str | None:
    """Move checkpoints of later steps into a new folder there, and return it; None if there are none."""
    later = [place.name for place in list_places(directory) if place.step > above_step]
    if not later:
        return None
    with exclusive(directory, deadline_s):
        folder = os.path.join(directory, aside_name(directory))
        disk.make_folder(folder)
        for name in reversed(later):  # the newest first: killed in the middle, none but old ones are left
            disk.rename(os.path.join(directory, name), os.path.join(folder, name))
        sync_folder(disk, folder)
        sync_folder(disk, directory)
    return folder
