"""A DataLoader whose `batch_size` is global: it gives this worker's replicas their rows, one body after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from duoka.collectives.collective import Collective
from duoka.data.shares import rows_to_compute, share
from duoka.errors import MismatchError
from duoka.frameworks.torch.dataset import make_seeded
from duoka.frameworks.torch.loop import Body, Loop
from duoka.frameworks.torch.nested import count_rows, map_tensors, take_rows
from duoka.frameworks.torch.order import digest, list_batches


class Hooks(Protocol):
    """What a loader tells about the loop, and asks of it."""

    def is_evaluating(self) -> bool: ...

    def begin_batch(self) -> None: ...

    def check_rows(self, rows: int) -> None: ...

    def begin_body(self, is_first: bool) -> None: ...

    def end_body(self, body: Body) -> None: ...

    def end_batch(self) -> None: ...

    def tell_once(self, text: str) -> None: ...


class PreparedLoader:
    """Stands in for the user's loader; whatever else is asked of it goes to that one."""

    def __init__(
        self,
        loader: DataLoader[Any],
        collective: Collective,
        loop: Loop,
        device: torch.device,
        hooks: Hooks,
    ) -> None:
        self._loader = loader
        self._collective = collective
        self._loop = loop
        self._device = device
        self._hooks = hooks
        self._epoch = -1

    def __len__(self) -> int:
        """Global batches."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._hooks.is_evaluating():
            return self._evaluate()
        self._epoch += 1
        if isinstance(self._loader.dataset, IterableDataset):
            return self._train_stream()
        return self._train_indexed()

    def _train_indexed(self) -> Iterator[Any]:
        batches = list_batches(self._loader, self._loop.seed, self._epoch)
        self._loop.order = digest(batches)
        source = _Source(self._loader, batches, self._loop.seed, self._epoch, self._collective)
        for position, batch in enumerate(batches):
            yield from self._bodies(len(batch), partial(source.load, position))

    def _train_stream(self) -> Iterator[Any]:
        """Every worker reads the whole stream and keeps its share."""
        self._hooks.tell_once("an IterableDataset is read in full by every worker, which keeps its share of each batch")
        for batch in self._loader:
            rows = count_rows(batch)
            if rows is None:
                raise MismatchError("A batch of an IterableDataset has no tensor to count rows by.")
            yield from self._bodies(rows, partial(self._cut, batch, rows))

    def _cut(self, batch: Any, num_rows: int, replica: int) -> Any:
        return take_rows(batch, rows_to_compute(num_rows, self._collective.num_replicas, replica))

    def _bodies(self, num_rows: int, load: Callable[[int], Any]) -> Iterator[Any]:
        """One global batch: a body for each replica of this worker, and for those it inherits."""
        self._hooks.begin_batch()
        done: set[int] = set()
        while remaining := [r for r in self._collective.replicas if r not in done]:
            replica = remaining[0]
            rows = len(share(num_rows, self._collective.num_replicas, replica))
            self._hooks.check_rows(rows)
            batch = map_tensors(load(replica), lambda tensor: tensor.to(self._device, non_blocking=True))
            self._hooks.begin_body(is_first=not done)
            with self._loop.run_body(replica, rows, num_rows) as body:
                yield batch
                self._hooks.end_body(body)
            done.add(replica)
        self._hooks.end_batch()

    def _evaluate(self) -> Iterator[Any]:
        for batch in self._loader:
            yield map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))


class _Source:
    """Loads the rows of single replicas. Its order of loading follows the placement, ahead of time where that helps."""

    def __init__(
        self, loader: DataLoader[Any], batches: list[list[Any]], seed: int, epoch: int, collective: Collective
    ) -> None:
        self._loader = loader
        self._batches = batches
        self._epoch = epoch
        self._collective = collective
        self._dataset = make_seeded(loader.dataset, seed)
        self._ahead: Iterator[Any] | None = None
        self._expected: list[tuple[int, int]] = []

    def load(self, position: int, replica: int) -> Any:
        if self._ahead is None or not self._expected or self._expected[0] != (position, replica):
            if self._ahead is not None and (position, replica) not in self._expected[:1]:
                self._ahead = None
            self._look_ahead(position, replica)
        assert self._ahead is not None
        self._expected.pop(0)
        return next(self._ahead)

    def _look_ahead(self, position: int, replica: int) -> None:
        """From here to the end of the epoch, as the replicas lie now. Built again when they have moved."""
        replicas = self._collective.replicas
        rest = [(at, r) for at in range(position, len(self._batches)) for r in replicas]
        if (position, replica) in rest:
            rest = rest[rest.index((position, replica)) :]
        else:
            rest = [(position, replica)]
        self._expected = rest
        self._ahead = iter(_rebuild(self._loader, self._dataset, [self._keys(at, r) for at, r in rest]))

    def _keys(self, position: int, replica: int) -> list[tuple[int, Any]]:
        batch = self._batches[position]
        rows = rows_to_compute(len(batch), self._collective.num_replicas, replica)
        return [(self._epoch, batch[row]) for row in rows]


def _rebuild(loader: DataLoader[Any], dataset: Any, batches: list[list[Any]]) -> DataLoader[Any]:
    """The user's loader with another order: everything else as it was given."""
    given: dict[str, Any] = {}
    if loader.num_workers:
        given = {"prefetch_factor": loader.prefetch_factor, "multiprocessing_context": loader.multiprocessing_context}
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **given,
    )
