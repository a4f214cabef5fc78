"""Loads the rows of single replicas through the user's own DataLoader settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from duoka.data.seeds import derive
from duoka.data.shares import STAND_IN_ROWS, share
from duoka.frameworks.torch.dataset import SeededDataset, make_collate
from duoka.frameworks.torch.loader_processes import start
from duoka.frameworks.torch.randomness import seeded

Unit = tuple[int, ...]  # the replicas that run as one body


def rows_of(num_rows: int, num_replicas: int, unit: Unit) -> tuple[Sequence[int], int]:
    """The rows that a body computes, and how many of them are its own: none, if they are a stand-in."""
    own = [row for replica in unit for row in share(num_rows, num_replicas, replica)]
    return (own, len(own)) if own else (range(min(STAND_IN_ROWS, num_rows)), 0)


class Source:
    """Batches of one loader, in the order in which the bodies ask for them, loaded ahead where workers do that."""

    def __init__(self, loader: DataLoader[Any], seed: int, num_replicas: int, units: Callable[[], list[Unit]]) -> None:
        self._seed = seed
        self._num_replicas = num_replicas
        self._units = units
        self._order = _Order()
        self._inner = rebuild(loader, SeededDataset(loader.dataset, seed), self._order)
        self._batches: list[list[Any]] = []
        self._epoch = 0
        self._ahead: Iterator[Any] | None = None
        self._expected: list[tuple[int, Unit]] = []

    def begin(self, batches: list[list[Any]], epoch: int) -> None:
        self._batches, self._epoch, self._ahead = batches, epoch, None

    def end(self) -> None:
        """Let the loader's processes end now: at the end of the program they would be killed."""
        self._ahead = None

    def load(self, position: int, unit: Unit) -> Any:
        if self._ahead is None or not self._expected or self._expected[-1] != (position, unit):
            self._look_ahead(position, unit)
        assert self._ahead is not None
        self._expected.pop()
        return next(self._ahead)

    def _look_ahead(self, position: int, unit: Unit) -> None:
        """From here to the end of the epoch, as the replicas lie now. Built again when they have moved."""
        units = self._units()
        first = units[units.index(unit) :] if unit in units else [unit]
        rest = [(position, u) for u in first]
        if unit in units:
            rest += [(later, u) for later in range(position + 1, len(self._batches)) for u in units]
        self._ahead = None  # ends the loader's processes before others are started
        self._order.batches = [self._keys(at, u) for at, u in rest]
        # A loader draws a seed for its processes: from a stream of its own, not from the one that all workers share.
        with seeded(derive("loader", self._seed, self._epoch, position, unit[0])):
            self._ahead = start(self._inner)
        self._expected = rest[::-1]

    def _keys(self, position: int, unit: Unit) -> list[tuple[int, Any]]:
        batch = self._batches[position]
        rows, _ = rows_of(len(batch), self._num_replicas, unit)
        return [(self._epoch, batch[row]) for row in rows]


class _Order:
    """A batch sampler that gives what it is told to, so that one loader, and its processes, serve all epochs."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def rebuild(loader: DataLoader[Any], dataset: Any, batches: Any) -> DataLoader[Any]:
    """The user's loader with another order: everything else as it was given."""
    given: dict[str, Any] = {}
    if loader.num_workers:
        given = {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
            "persistent_workers": loader.persistent_workers,
        }
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=make_collate(loader.collate_fn),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **given,
    )
