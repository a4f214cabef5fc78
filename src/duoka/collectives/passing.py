"""Arrays from replica to all: gathered or broadcast as they are, in as many calls as it takes to pass them on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from duoka.collectives.arrays import Array, as_array
from duoka.collectives.staging import SLOT_BYTES
from duoka.collectives.transfer import get, put, read_header, write_header

if TYPE_CHECKING:
    from duoka.collectives.shm import SharedMemory


def gather(collective: SharedMemory, values: Sequence[Any], deadline_s: float | None) -> list[Array]:
    """The values of all replicas, of which this worker gives those of its own."""
    staging = collective.staging
    arrays = [np.asarray(as_array(v), order="C") for v in values]
    mine = dict(zip(collective.replicas, arrays, strict=True))
    headers = {replica: write_header(array) for replica, array in mine.items()}
    workers = collective.workers
    number = collective.begin("all_gather")
    for replica, array in mine.items():
        staging.write_note(number, replica, headers[replica])
        put(staging.slot(number, replica), array, 0)
    collective.meet_once(number, deadline_s, lambda: False)
    results = [read_header(staging.read_note(number, r)) for r in range(collective.num_replicas)]
    for start in range(0, max(1, *(array.nbytes for array in results)), SLOT_BYTES):
        if start > 0:
            collective.complete(number)
            collective.refuse_loss_of(workers, number)
            number = collective.begin(f"all_gather, part {start // SLOT_BYTES}")
            for replica, array in mine.items():
                put(staging.slot(number, replica), array, start)
            collective.meet_once(number, deadline_s, lambda: False)
        for replica, array in enumerate(results):
            get(staging.slot(number, replica), array, start)
    collective.complete(number)
    return results


def broadcast(collective: SharedMemory, value: Any, root: int, deadline_s: float | None) -> Array:
    """The value of one replica, which the worker that runs it gives."""
    staging, meeting = collective.staging, collective.meeting
    sender = collective.dealing.placement_in(collective.next_number).owner(root)
    source = np.asarray(as_array(value), order="C") if sender == collective.worker else None
    header = None if source is None else write_header(source)
    number = collective.begin(f"broadcast from replica {root}")
    wide = staging.wide_bytes
    if source is not None and header is not None:
        staging.write_note(number, root, header)
        put(staging.wide(number), source, 0)
    collective.meet_once(number, deadline_s, lambda: sender in meeting.membership.workers)
    result = read_header(staging.read_note(number, root)) if source is None else source
    for start in range(0, max(1, result.nbytes), wide):
        if start > 0:
            collective.complete(number)
            collective.refuse_loss_of([sender], number)
            number = collective.begin(f"broadcast from replica {root}, part {start // wide}")
            if source is not None:
                put(staging.wide(number), source, start)
            collective.meet_once(number, deadline_s, lambda: sender in meeting.membership.workers)
        if source is None:
            get(staging.wide(number), result, start)
    collective.complete(number)
    return result.copy() if source is not None else result
