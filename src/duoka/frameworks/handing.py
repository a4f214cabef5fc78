"""The whole state of a run, from a worker that trains to one that joins: as a file in memory, never pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from duoka.checkpoint.files import collect, load_state
from duoka.checkpoint.storage import write_storage
from duoka.errors import CannotJoin, CheckpointError
from duoka.frameworks.saving import list_codecs

if TYPE_CHECKING:
    from duoka.strategies.strategy import Restorable


def give(training: Restorable, also: Mapping[str, Any], fd: int) -> None:
    """Write the state of this worker, at a border between steps, into an empty file, and that of the user's objects."""
    state = {"run": training.capture(), "also": {name: thing.state_dict() for name, thing in also.items()}}
    tree, tensors = collect(state, list_codecs())
    with os.fdopen(os.dup(fd), "wb") as file:
        write_storage(file, tree, tensors)


def take(training: Restorable, also: Mapping[str, Any], fd: int) -> None:
    """Put that state into this worker. What does not fit is this worker's own failure."""
    try:
        state = load_state(f"/proc/self/fd/{fd}", list_codecs())
        training.restore(state["run"])
        for name, thing in also.items():
            if name in state["also"]:
                thing.load_state_dict(state["also"][name])
    except CheckpointError as error:
        raise CannotJoin("The state of the run does not fit to this worker.", why=str(error)) from error
