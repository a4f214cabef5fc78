"""What the replicas evaluate of a loader: one contiguous block of its order each, loaded with the user's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from duoka.data.seeds import derive
from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.torch.dataset import SeededDataset
from duoka.frameworks.torch.loader_processes import start, start_anew
from duoka.frameworks.torch.nested import count_rows, take_rows
from duoka.frameworks.torch.order import digest, list_batches, seeded_order
from duoka.frameworks.torch.randomness import seed_all
from duoka.frameworks.torch.source import rebuild


class Blocks:
    """The rows of each replica: a pure function of the seed, the loader and the number of replicas.

    A seed of its own, the same for every evaluation: a shuffled loader gives one order, on all workers, and random
    transforms give each sample the same values every time. A stream cannot be cut into blocks: each replica gets its
    share of every batch.
    """

    def __init__(self, loader: DataLoader[Any], num_replicas: int, seed: int) -> None:
        self._loader = loader
        self._num_replicas = num_replicas
        self._seed = derive("evaluation", seed)
        self.is_stream = isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None
        self._batches = [] if self.is_stream or num_replicas == 1 else list_batches(loader, self._seed, 0)

    @property
    def order(self) -> str:
        """A fingerprint, to compare between workers."""
        return "a stream" if self.is_stream else f"order {digest(self._batches)}"

    def read(
        self, replicas: Sequence[int], pass_number: int, begin: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        """These replicas' batches, each with its replica; one replica of one gets what the user's loader gives.

        `begin` hears which replica comes next.
        Leaves the global generators seeded from (seed, pass, replica), for what is done with the batch.
        """
        if self._num_replicas == 1:
            return ((0, batch) for batch in start_anew(self._loader))
        read = self._read_stream if self.is_stream else self._read_blocks
        return read(replicas, pass_number, begin)

    def _read_blocks(
        self, replicas: Sequence[int], pass_number: int, begin: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        dataset = SeededDataset(self._loader.dataset, self._seed)
        for replica in replicas:
            batches = [[(0, index) for index in batch] for batch in self._cut(replica)]
            if not batches:
                continue
            begin(replica)
            # A loader for each replica: what its processes draw must not depend on how many replicas a worker runs.
            with seeded_order(self._loader, derive("block", self._seed, replica), pass_number):
                source = start(rebuild(self._loader, dataset, batches))
            seed_all(derive("block", self._seed, pass_number, replica))
            for batch in source:
                yield replica, batch

    def _cut(self, replica: int) -> list[list[Any]]:
        """This replica's block, in batches of 1/R of the global size.

        What a batch sampler of the user's own put together is not mixed: it may be all that can be collated.
        """
        size = self._loader.batch_size
        batches = self._batches
        if size is not None:
            batches = [[index for batch in batches for index in batch]]
        block = share(sum(len(batch) for batch in batches), self._num_replicas, replica)
        found, start = [], 0
        for batch in batches:
            rows = batch[max(0, block.start - start) : max(0, block.stop - start)]
            step = -(-(size or len(batch)) // self._num_replicas)
            found += [rows[first : first + step] for first in range(0, len(rows), step)]
            start += len(batch)
        return found

    def _read_stream(
        self, replicas: Sequence[int], pass_number: int, begin: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        with seeded_order(self._loader, self._seed, 0):
            batches = start_anew(self._loader)
        for position, batch in enumerate(_seed_before_each(batches, self._seed)):
            num_rows = count_rows(batch)
            if num_rows is None:
                raise MismatchError(
                    f"A batch has no tensor to count rows by: it is a {type(batch).__name__}.",
                    do="let the loader give tensors whose first dimension is the rows.",
                )
            for replica in replicas:
                if rows := share(num_rows, self._num_replicas, replica):
                    begin(replica)
                    seed_all(derive("block", self._seed, pass_number, replica, position))
                    yield replica, take_rows(batch, rows)


def _seed_before_each(batches: Iterator[Any], seed: int) -> Iterator[Any]:
    """All workers read the same stream, whatever was drawn between two batches."""
    position = 0
    while True:
        seed_all(derive("stream", seed, position))
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield batch
        position += 1
