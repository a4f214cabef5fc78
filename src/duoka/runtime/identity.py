"""Who this process is: a worker of a run, or nobody in particular.

The supervisor says it in one environment variable. A worker's own children inherit the variable, so it
counts only in a process whose parent is the supervisor that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

VARIABLE = "DUOKA_WORKER"


@dataclass(frozen=True)
class Identity:
    worker: int
    supervisor: int  # its process id
    link: int  # file descriptors from here on
    inbox: int
    outboxes: tuple[int, ...]
    board: int
    arena: int
    chronicle: int
    parcel: int
    stack: int
    plan: str
    run_directory: str = ""  # where the run keeps its files; empty: it has none
    columns: int = 0  # the width of the terminal that shows what this worker prints; 0: there is none
    snapshots: tuple[int, ...] = ()  # see `SnapshotMemory.descriptors_of`; empty: none are taken
    generation: int = 0
    members: tuple[int, ...] | None = None  # whom a newcomer wants to join; None: this worker is one of the first

    def descriptors(self) -> tuple[int, ...]:
        memory = self.board, self.arena, self.chronicle, self.parcel, self.stack, *dict.fromkeys(self.snapshots)
        return (self.link, self.inbox, *self.outboxes, *memory)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_identity(environ: Mapping[str, str], parent: int) -> Identity | None:
    try:
        fields = json.loads(environ[VARIABLE])
        if fields["supervisor"] != parent:
            return None
    except (KeyError, TypeError, ValueError):
        return None  # not set, or set by somebody else
    members = fields.get("members")
    fields["members"] = None if members is None else tuple(members)
    return Identity(**{**fields, **{name: tuple(fields[name]) for name in ("outboxes", "snapshots")}})
