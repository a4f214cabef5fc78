"""What a replica says beside its numbers. Everybody reads all notes, and draws the same conclusions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from duoka.errors import MismatchError


class DifferentBatches(MismatchError):
    """Whoever knows where the data comes from can say more."""


@dataclass(frozen=True)
class Note:
    data: int  # a digest of the global batch
    rate: float | None  # the learning rate
    others: int  # a digest of state that is not merged

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Note:
        return cls(**json.loads(data))


def compare(packed: Sequence[bytes], step: int, tell: Callable[[str], None]) -> None:
    """All workers see the same notes, so either all of them raise or none. Replicas without rows say nothing."""
    if len({note for note in packed if note}) == 1:
        return
    present = [(replica, Note.unpack(note)) for replica, note in enumerate(packed) if note]
    first_replica, first = present[0]
    for replica, note in present:
        if note.data != first.data:
            raise DifferentBatches(
                f"At step {step} replicas {first_replica} and {replica} saw different global batches.",
                why="every worker reads the same data and takes its rows: the order must be the same everywhere.",
                do="give shuffles a seed, sort what comes out of a set, and build the dataset after the strategy; call"
                " strategy.run equally often on all workers.",
            )
        if note.rate != first.rate:
            raise MismatchError(
                f"At step {step} the learning rate is {first.rate} for replica {first_replica} and {note.rate} for"
                f" replica {replica}.",
                why="a callback or the script has set it on some workers only.",
                do="set it on every worker; let it depend on the logs, which are equal everywhere.",
            )
    if len({note.others for _, note in present}) > 1:
        tell("counters or other state that is not made of floats differ between replicas, and replica 0's count")
