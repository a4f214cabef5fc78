"""The batches of a stream, on a worker that may have left some of them to another one to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from duoka.errors import WorkerLost
from duoka.frameworks.keras.data import digest


class Stream:
    """One run through a dataset, or a generator that goes on from epoch to epoch. `fit` takes batches out of it."""

    def __init__(self, batches: Iterable[Any], take: Callable[[Stream], Any]) -> None:
        self._batches: Iterator[Any] = iter(batches)
        self._take = take
        self._skipped: deque[int] = deque()  # digests of batches that came from the worker that reads for all
        self.is_new = True

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        batch = self._take(self)
        self.is_new = False
        return batch

    @property
    def num_skipped(self) -> int:
        return len(self._skipped)

    def look(self) -> None:
        """Read the first batch, and keep it: whatever is shuffled at the start of an epoch is shuffled now."""
        first = list(islice(self._batches, 1))
        self._batches = chain(first, self._batches)

    def skip(self, batch: Any) -> None:
        """This batch came from another worker."""
        self._skipped.append(digest(batch))

    def read(self) -> Any:
        """The next batch, by this worker, behind all that it has skipped."""
        while self._skipped:
            if digest(next(self._batches, None)) != self._skipped[0]:
                raise WorkerLost(
                    "The worker that read for all was lost, and this one reads other batches than it did.",
                    why="the stream draws from a generator of its own, which moves on with each batch that is read.",
                    do="start again from the last checkpoint; let what it draws follow from the epoch and the index.",
                )
            self._skipped.popleft()
        return next(self._batches)
