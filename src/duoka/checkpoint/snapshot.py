"""A state at one moment, and memory that holds it while training goes on."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from duoka.checkpoint.codec import Codec
from duoka.checkpoint.files import collect
from duoka.checkpoint.names import LARGEST_STEP
from duoka.checkpoint.storage import StoredTensor
from duoka.checkpoint.tree import describe
from duoka.errors import CheckpointError

_ALIGNMENT = 64


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint holds."""

    step: int
    facts: dict[str, Any]  # as JSON values
    tree: Any  # the shape of the state, as JSON values
    tensors: dict[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        return sum(_padded(tensor.nbytes) for tensor in self.tensors.values())


def take(step: int, facts: dict[str, Any], state: Any, codecs: Sequence[Codec]) -> Snapshot:
    """Look at a state without copying its tensors: what is read later is what they hold then.

    Facts are plain values, without tensors. What cannot be saved is a CheckpointError.
    """
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= LARGEST_STEP:
        raise CheckpointError(f"{step!r} is no number of a step.", do="give a whole number, 0 or more.")
    if type(facts) is not dict or not all(type(key) is str and not key.startswith("$") for key in facts):
        raise CheckpointError("The facts of a checkpoint are a dictionary with names.", why=f"they were {facts!r}.")
    plain = describe(facts, lambda value, place: None)
    return Snapshot(step, plain, *collect(state, codecs))


class Room:
    """Memory for the tensors of one snapshot after the other. It grows when it must, and never shrinks.

    Its pages are touched once: a first copy into fresh ones takes up to fifty times as long as the ones after it.
    A forked child does not get them; with them, the parent's next copy would be slow again (copy-on-write).
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def make(self, nbytes: int) -> None:
        """See that so many bytes are there, touched."""
        if nbytes > len(self._bytes):
            self._bytes = np.empty(0, np.uint8)  # the old pages go before new ones come
            self._bytes = _allocate(nbytes)

    def hold(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot, as it is now: its tensors are copied here, until the next call."""
        self.make(snapshot.nbytes)
        start, held = 0, {}
        for name, tensor in snapshot.tensors.items():
            part = self._bytes[start : start + tensor.nbytes]
            if tensor.nbytes:
                # libc's memcpy, without the interpreter's lock.
                np.copyto(part, np.frombuffer(tensor.read(), np.uint8))
            held[name] = tensor._replace(read=part.view)
            start += _padded(tensor.nbytes)
        return replace(snapshot, tensors=held)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _allocate(nbytes: int) -> np.ndarray[Any, Any]:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for wish in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        try:
            pages.madvise(getattr(mmap, wish))
        except (AttributeError, OSError):
            pass  # kernels without it do the same, slower
    memory = np.frombuffer(pages, np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory
