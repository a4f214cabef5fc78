"""Whole-share mode: a worker's rows as one batch, through the step as it is written, with exchanges in its middle.

It is for steps that cannot be held back until their end: those that look at the weights after they have applied
gradients, or apply more than once, and those that normalise with the statistics of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.data.shares import STAND_IN_ROWS, share
from duoka.errors import MismatchError
from duoka.frameworks.exchange.note import Note, compare
from duoka.frameworks.exchange.outcome import Outcome
from duoka.frameworks.exchange.transfer import digest_of
from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.keras.backends import load_share_backend
from duoka.frameworks.keras.data import count_rows, digest
from duoka.frameworks.keras.share_backend import ShareBackend
from duoka.frameworks.keras.steps import Progress


class WholeShareSteps:
    def __init__(
        self,
        model: Any,
        collective: Collective,
        progress: Progress,
        tell: Callable[[str], None],
        *,
        reason: str,
        sync_batchnorm: bool,
    ) -> None:
        self._collective, self._progress, self._tell = collective, progress, tell
        self._wire = Wire(
            collective,
            why_lost="in whole-share mode a step exchanges in its middle, so that lost rows cannot be computed again.",
            do_when_lost="keep checkpoints (strategy.checkpoint): then the run goes back to the last one by itself.",
        )
        self._backend: ShareBackend = load_share_backend()(model, self._wire, tell, sync_batchnorm=sync_batchnorm)
        tell(
            f"the train_step of {type(model).__name__} runs in whole-share mode, because {reason}: each worker's rows"
            " are one batch, and gradients are exchanged at each apply; numbers as one device where nothing else mixes"
            " rows, bits for a fixed number of workers only"
        )

    @property
    def state(self) -> Any:
        return self._backend.state

    def run(self, batch: Any, state: Any = None) -> dict[str, Any]:
        """Train on one global batch; gives the logs. A worker that is lost on the way ends the run."""
        if len(self._collective.placement.shares) != len(self._collective.workers):
            self._collective.end_step()  # after a loss between two steps: deals anew, so that shares are in one piece
        backend, replicas = self._backend, self._collective.replicas
        backend.begin_batch(self._progress.batch, state)
        self._progress.batch += 1
        batch = backend.read(batch)
        total_rows = self._progress.rows = count_rows(batch)
        first, last = (share(total_rows, self._collective.num_replicas, at) for at in (replicas[0], replicas[-1]))
        num_rows = last.stop - first.start
        rows = range(first.start, last.stop) or range(min(STAND_IN_ROWS, total_rows))
        self._wire.begin(num_rows, total_rows)
        rate = backend.learning_rate()
        self._collective.work_on(self._progress.step, replicas)
        outcome = backend.compute(backend.cut(batch, rows), replicas[0], total_rows / len(rows))
        logs = self._merge(outcome, Note(digest(batch), rate, digest_of(outcome.others)))
        self._collective.end_step()
        self._progress.step += 1
        return logs

    def _merge(self, outcome: Outcome, note: Note) -> dict[str, Any]:
        if self._wire.is_alone:
            return self._backend.apply({}, {}, outcome)
        differs = self._compare(outcome, note)
        num_moving = len(outcome.moving)
        moving = [n for n in range(num_moving) if differs[n]]
        others = [n for n in range(len(outcome.others)) if differs[num_moving + n]]
        weight = self._wire.weight
        parts = [*(outcome.moving[n] for n in moving), *outcome.logs, *outcome.metrics]
        weights = [weight] * (len(moving) + len(outcome.logs)) + [float(weight > 0)] * len(outcome.metrics)
        sums = iter(self._wire.add_up(parts, weights))
        merged = {n: next(sums) for n in moving}
        logs = [next(sums) for _ in outcome.logs]
        taken = {n: self._wire.broadcast(outcome.others[n]) for n in others}
        return self._backend.apply(merged, taken, Outcome([], [], [], list(sums), logs))

    def _compare(self, outcome: Outcome, note: Note) -> list[bool]:
        """Which state is not the same everywhere. The rest is left alone: a mean of equal values has other bits."""
        digests = np.array([digest_of([array]) for array in (*outcome.moving, *outcome.others)], np.uint32)
        packed = np.frombuffer(note.pack(), np.uint8)
        header = np.array([len(packed)], np.uint32).view(np.uint8)
        messages = [
            _Message.unpack(part)
            for part in self._wire.gather(np.concatenate([header, packed, digests.view(np.uint8)]))
        ]
        notes = [b""] * self._collective.num_replicas
        for worker, message in zip(self._wire.workers, messages, strict=True):
            notes[self._collective.placement.replicas_of(worker)[0]] = message.note
        compare(notes, self._progress.step, self._tell)
        if len({len(message.digests) for message in messages}) > 1:
            raise MismatchError(
                f"At step {self._progress.step} the train_step changed different variables on different workers.",
                do="let it do the same on every worker, whatever its rows are.",
            )
        columns = zip(*(message.digests.tolist() for message in messages), strict=True)
        return [len(set(column)) > 1 for column in columns]


@dataclass(frozen=True)
class _Message:
    note: bytes
    digests: Array

    @classmethod
    def unpack(cls, data: Array) -> _Message:
        stop = 4 + int(data[:4].view(np.uint32)[0])
        return cls(data[4:stop].tobytes(), data[stop:].copy().view(np.uint32))
