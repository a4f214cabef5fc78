"""Snapshot policy: when the state of a run is kept in memory, and how a run whose workers were all lost resumes.

The main worker names a boundary in shared memory, one batch ahead, as `stopping.py` does: every worker finds the same
one. There the main worker writes the state for all. In a training of which every worker keeps its own state, every
worker writes its part.

A snapshot is taken at most every 10 s, and at most 1 % of the time goes into it. What the first one will cost is
estimated from its size, so that a small state is kept soon after its first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from duoka.checkpoint.codec import Codec
from duoka.checkpoint.files import collect, load_tensors, naming_errors
from duoka.checkpoint.memory_snapshot import Entry, SnapshotFiles
from duoka.checkpoint.storage import StoredTensor, read_part_tree
from duoka.collectives.collective import Collective
from duoka.errors import DuokaError, OutOfMemory
from duoka.strategies.borders import Borders
from duoka.strategies.strategy import Restorable

LEAST_S = 10.0  # between two snapshots
SHARE = 0.01  # of the time
_BYTES_PER_S = 5e8  # a cautious guess, for the first one: into memory that was never touched


class Snapshots:
    """One worker's part in it. A guest of step boundaries."""

    def __init__(
        self,
        collective: Collective,
        files: SnapshotFiles,
        borders: Borders,
        codecs: Callable[[], Sequence[Codec]],
        say: Callable[[str], None],
        *,
        is_newcomer: bool = False,
        least_s: float = LEAST_S,
        share: float = SHARE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collective, self._files, self._borders = collective, files, borders
        self._codecs, self._say, self._clock = codecs, say, clock
        self._least_s, self._share = least_s, share
        self._named = collective.common(8).view(np.int64)  # the batch of the boundary, plus one: zero is none
        self._seen = 0  # the last one at which this worker was
        self._seen_at = -1  # the batch there
        self._training: Restorable | None = None
        self._first_step = 0
        self._begin = 0.0
        self._due: float | None = None  # of the next one; None: not even the first one's cost is known
        self._has_failed = False
        # What this start resumes from. Nobody writes before all have read it; replacements are handed a state.
        self._newest = None if is_newcomer else files.ledger.newest()
        borders.restart_step = None if self._newest is None else self._newest.step

    # Resuming.

    def resume(self, training: Restorable) -> None:
        """The loop over epochs or steps is about to begin: continue from the snapshot, if there is one.

        Not if a checkpoint is of a later step: then `restart_step` is None by now.
        """
        entry, self._newest = self._newest, None
        if entry is None or self._borders.restart_step is None:
            return
        begin = self._clock()
        state = self._read(entry)
        self._borders.also.restore(state["also"])
        training.restore(state["run"])
        if self._is_main():
            seconds = self._clock() - begin
            self._say(
                f"resumed from the snapshot in memory of step {entry.step} ({seconds:.1f} s). Of the script's own"
                " variables it has those that are registered (strategy.register); enumerate(loader) begins at 0"
            )

    def _read(self, entry: Entry) -> Any:
        name = f"the snapshot of step {entry.step}"
        part = self._collective.worker if entry.num_parts > 1 else 0
        with naming_errors(name), self._files.open(part, entry) as file:
            return load_tensors(file, name, read_part_tree(file, name), self._codecs())

    # Keeping.

    def at_border(self, training: Restorable) -> None:
        if not self._follows(training):
            return
        named, batch = int(self._named[0]), training.batch
        if named != self._seen:
            if named <= batch + 1:
                self._seen, self._seen_at = named, batch
                self._keep(training, named)
        # Only after a batch more: until then another worker may be on its way to the boundary that was named last.
        elif batch > self._seen_at and self._is_main() and self._is_due(training):
            self._named[0] = batch + 2

    def _follows(self, training: Restorable) -> bool:
        """Whether the state of this training is that of the run, as far as is known. Older snapshots stay good."""
        if self._has_failed or not getattr(training, "can_be_snapshotted", False):
            return False
        if self._training is None:
            self._codecs()  # imports what it needs: once, and not what a snapshot costs
            self._training, self._first_step, self._begin = training, training.step, self._clock()
        return training is self._training

    def _is_main(self) -> bool:
        return self._collective.worker == self._collective.main

    def _is_due(self, training: Restorable) -> bool:
        if training.step == self._first_step:
            return False  # optimizers have no state before their first step
        if self._due is None:
            newest = self._files.ledger.newest()  # of the main worker before this one, or of the start before
            earliest = self._begin if newest is None else newest.at + self._least_s
            self._due = max(earliest, self._begin + self._estimate(training) / self._share)
        return self._clock() >= self._due

    def _estimate(self, training: Restorable) -> float:
        """What the first one will cost, in seconds."""
        begin = self._clock()
        found = self._collect(training)
        if found is None:
            return 0.0
        nbytes = sum(tensor.nbytes for tensor in found[1].values())
        return 2 * (self._clock() - begin) + nbytes / _BYTES_PER_S

    def _keep(self, training: Restorable, boundary: int) -> None:
        """At the boundary that was named: write what this worker is to write."""
        is_own = getattr(training, "every_worker_keeps_its_state", False)
        if not (is_own or self._is_main()):
            return
        begin = self._clock()
        if (found := self._collect(training)) is not None:
            part, num_parts = (self._collective.worker, len(self._collective.workers)) if is_own else (0, 1)
            try:
                self._files.write(part, Entry(training.step, boundary, num_parts, begin), *found)
            except (OutOfMemory, OSError) as error:
                self._give_up(error)
        end = self._clock()
        self._due = end + max(self._least_s, (end - begin) / self._share)

    def _collect(self, training: Restorable) -> tuple[Any, dict[str, StoredTensor]] | None:
        try:
            return collect({"run": training.capture(), "also": self._borders.also.capture()}, self._codecs())
        except Exception as error:  # as in a hand-over: the script never asked for this, and must not end for it
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        """The run trains on. When all its workers are lost, it has only older snapshots, or none."""
        self._has_failed = True
        what = error.what if isinstance(error, DuokaError) else f"{type(error).__name__}: {error}"
        self._say(f"no more snapshots in memory are taken: {what.splitlines()[0].rstrip('.')}")
