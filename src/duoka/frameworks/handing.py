"""The whole state of a run, from a worker that trains to one that joins: as a file in memory, never pickle."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from duoka.checkpoint.files import collect, load_state
from duoka.checkpoint.storage import write_storage
from duoka.devices.cpu import available_bytes
from duoka.errors import CannotJoin, CheckpointError, OutOfMemory
from duoka.frameworks.saving import list_codecs

if TYPE_CHECKING:
    from duoka.strategies.also import Also
    from duoka.strategies.strategy import Restorable


_COPIES = 2  # the file, and what the newcomer reads out of it
_HEADER_BYTES = 1 << 20  # more than that a header rarely has, and what is allocated is cut off at the end of the file


def give(training: Restorable, also: Also, fd: int, available: Callable[[], int] = available_bytes) -> None:
    """Write the state of this worker, at a border between steps, into an empty file, and that of the user's objects.

    The memory is really there before it is written to: a shortage is an error here, which keeps the newcomer out, and
    not the end of this worker, and then of the next one that tries.
    """
    state = {"run": training.capture(), "also": also.capture()}
    tree, tensors = collect(state, list_codecs())
    tensor_bytes = sum(tensor.nbytes for tensor in tensors.values())
    nbytes = tensor_bytes + _HEADER_BYTES
    if _COPIES * nbytes > (free := available()):
        raise OutOfMemory(
            f"{_COPIES * nbytes / 2**20:,.0f} MB of memory for it cannot be had, {free / 2**20:,.0f} MB are free."
        )
    os.posix_fallocate(fd, 0, nbytes)
    with os.fdopen(os.dup(fd), "wb") as file:
        write_storage(file, tree, tensors)
    header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")  # a safetensors file begins with this
    os.ftruncate(fd, 8 + header_bytes + tensor_bytes)


def take(training: Restorable, also: Also, fd: int) -> None:
    """Put that state into this worker. What does not fit is this worker's own failure."""
    try:
        state = load_state(f"/proc/self/fd/{fd}", list_codecs())
        also.restore(state["also"])
        training.restore(state["run"])
    except CheckpointError as error:
        raise CannotJoin("The state of the run does not fit to this worker.", why=str(error)) from error
