"""The whole state of a run, from a worker that trains to one that joins: as a file in memory, never pickle."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from duoka.checkpoint.files import collect, load_state
from duoka.checkpoint.storage import write_storage
from duoka.errors import CannotJoin, CheckpointError
from duoka.frameworks.saving import list_codecs

if TYPE_CHECKING:
    from duoka.strategies.strategy import Restorable


def give(training: Restorable, fd: int) -> None:
    """Write the state of this worker, at a border between steps, into an empty file."""
    tree, tensors = collect(training.capture(), list_codecs())
    with os.fdopen(os.dup(fd), "wb") as file:
        write_storage(file, tree, tensors)


def take(training: Restorable, fd: int) -> None:
    """Put that state into this worker. What does not fit is this worker's own failure."""
    try:
        training.restore(load_state(f"/proc/self/fd/{fd}", list_codecs()))
    except CheckpointError as error:
        raise CannotJoin("The state of the run does not fit to this worker.", why=str(error)) from error
