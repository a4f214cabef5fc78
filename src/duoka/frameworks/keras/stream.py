"""The batches of a stream, on a worker that may have left some of them to another one to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from duoka.errors import WorkerLost
from duoka.frameworks.keras.data import digest


class Stream:
    """One run through a dataset, or a generator that goes on from epoch to epoch. `fit` takes batches out of it."""

    def __init__(
        self,
        batches: Iterable[Any],
        take: Callable[[Stream], Any],
        opening: Callable[[], AbstractContextManager[None]],
        skipped: deque[int],
    ) -> None:
        self._take, self._opening = take, opening
        self._skipped = skipped  # digests of batches that came from the worker that reads for all
        with opening():
            self._batches: Iterator[Any] = iter(batches)
        self._is_open = False
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

    def look(self) -> int | None:
        """Read the first batch, and keep it: whatever is shuffled at the start of an epoch is shuffled now."""
        try:
            first = self._advance()
        except StopIteration:
            return None
        self._batches = chain([first], self._batches)
        return digest(first)

    def skip(self, batch: Any) -> None:
        """This batch came from another worker."""
        self._skipped.append(digest(batch))

    def read(self) -> Any:
        """The next batch, by this worker, behind all that it has skipped. That is compared with what was trained on."""
        while self._skipped:
            if digest(self._advance(None)) != self._skipped[0]:
                raise WorkerLost(
                    "This worker has to read what another one had read for all, and finds other batches.",
                    why="the stream draws from a generator of its own, which moves on with each batch that is read.",
                    do="start again from the last checkpoint; let what it draws follow from the epoch and the index.",
                )
            self._skipped.popleft()
        return self._advance()

    def _advance(self, *default: Any) -> Any:
        if self._is_open:
            return next(self._batches, *default)
        self._is_open = True
        with self._opening():
            return next(self._batches, *default)
