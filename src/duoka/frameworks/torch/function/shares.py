"""A DataLoader that loads the samples of this worker's replicas only.

It is built around a batch sampler that wraps the user's own, so that PyTorch's own iterators make all draws: the seed
of the loader's processes, the order, prefetching, persistent workers. The order is that of the plain script.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from duoka.collectives.collective import Collective
from duoka.data.seeds import derive
from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.torch.loader_processes import start
from duoka.frameworks.torch.randomness import seeded


@dataclass(frozen=True)
class Request:
    """What one of the loader's processes loads: the shares of some replicas of one global batch."""

    epoch: int
    batch: int
    shares: tuple[tuple[int, tuple[Any, ...]], ...]  # replica, and the indices of its samples
    is_probe: bool = False  # also load some samples that all workers must find alike
    cuts: tuple[tuple[int, int], ...] = ()  # of the one share: collate these parts of it, in the place of replicas


class ShareDataset(Dataset[Any]):
    """The user's dataset, asked for shares. A share is loaded and collated under one seed of its own."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self._collate, self._seed = dataset, collate, seed

    def __getitems__(self, request: Request) -> tuple[dict[int, Any], int]:
        loaded: dict[int, Any] = {}
        if request.cuts:
            ((_, indices),) = request.shares
            seed = derive("check", self._seed, request.epoch, request.batch)
            with seeded(seed):
                samples = self._load(indices)
            for number, (start, stop) in enumerate(request.cuts):
                with seeded(seed):
                    loaded[number] = self._collate(samples[start:stop])
            return loaded, 0
        for replica, indices in request.shares:
            with seeded(derive("share", self._seed, request.epoch, request.batch, replica)):
                loaded[replica] = self._collate(self._load(indices))
        return loaded, self._probe() if request.is_probe else 0

    def _load(self, indices: Sequence[Any]) -> list[Any]:
        if getattr(self.dataset, "__getitems__", None):
            return list(self.dataset.__getitems__(list(indices)))
        return [self.dataset[index] for index in indices]

    def _probe(self) -> int:
        """A digest of samples 0, n/2 and n-1: a random_split without a seed is found by it."""
        try:
            count = len(self.dataset)
        except TypeError:
            return 0
        digest = 1
        for index in sorted({0, count // 2, count - 1}):
            with seeded(derive("probe", self._seed, index)):
                try:
                    digest = digest_sample(self._load([index])[0], digest)
                except (KeyError, IndexError):
                    return 0  # a dataset that is asked by names
        return digest


def digest_sample(sample: Any, digest: int) -> int:
    """Objects of unknown kinds count for nothing: their text may hold an address."""
    if isinstance(sample, torch.Tensor):
        return zlib.crc32(sample.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), digest)
    if isinstance(sample, np.ndarray) and sample.dtype != object:
        return zlib.crc32(np.ascontiguousarray(sample).tobytes(), digest)
    if isinstance(sample, tuple | list):
        for part in sample:
            digest = digest_sample(part, digest)
    elif isinstance(sample, dict):
        for key in sorted(sample, key=str):
            digest = digest_sample(sample[key], zlib.crc32(str(key).encode(), digest))
    elif isinstance(sample, int | float | str | bytes | np.generic):
        return zlib.crc32(repr(sample).encode(), digest)
    return digest


class _Initialise:
    """A `worker_init_fn` before the user's own: `get_worker_info().dataset` is the user's dataset there, as ever."""

    def __init__(self, theirs: Callable[[int], None] | None) -> None:
        self._theirs = theirs

    def __call__(self, number: int) -> None:
        info: Any = get_worker_info()
        wrapper = info.dataset
        object.__setattr__(info, "dataset", wrapper.dataset)  # it refuses to be changed by its own means
        if self._theirs is not None:
            self._theirs(number)
            wrapper.dataset = info.dataset


class _Requests:
    """A batch sampler: the user's own batches as requests. What it has asked for is kept until it arrives."""

    def __init__(self, batches: Any, collective: Collective) -> None:
        self._batches, self._collective = batches, collective
        self.issued: deque[list[Any]] = deque()
        self.epoch = 0

    def __iter__(self) -> Iterator[Request]:
        self.issued.clear()
        return self._ask(iter(self._batches))  # begun here: a sampler may draw when its iteration begins

    def _ask(self, batches: Iterator[Any]) -> Iterator[Request]:
        for number, batch in enumerate(batches):
            indices = list(batch)
            self.issued.append(indices)
            shares = tuple(self.cut(indices, replica) for replica in self._collective.replicas)
            yield Request(self.epoch, number, shares_with_samples(shares), is_probe=self.epoch == number == 0)

    def cut(self, indices: list[Any], replica: int) -> tuple[int, tuple[Any, ...]]:
        rows = share(len(indices), self._collective.num_replicas, replica)
        return replica, tuple(indices[rows.start : rows.stop])

    def __len__(self) -> int:
        return len(self._batches)


def shares_with_samples(shares: Sequence[tuple[int, tuple[Any, ...]]]) -> tuple[tuple[int, tuple[Any, ...]], ...]:
    return tuple((replica, indices) for replica, indices in shares if indices)


@dataclass(frozen=True)
class Loaded:
    """One global batch: its size, and how to get at a replica's samples."""

    num_samples: int
    load: Callable[[int], Any]
    load_cuts: Callable[[tuple[tuple[int, int], ...]], dict[int, Any]]
    digest: int


class ShareLoader:
    """The user's loader with other requests; everything else as it was given."""

    def __init__(self, loader: DataLoader[Any], collective: Collective, seed: int) -> None:
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise MismatchError(
                f"{type(loader).__name__} has an __iter__ of its own: its batches cannot be split between replicas.",
                why="Duoka builds a loader around its dataset and sampler, which would not use that method.",
                do="put what it does into the dataset, the sampler or collate_fn of a plain DataLoader.",
            )
        self._loader = loader
        self._dataset = ShareDataset(loader.dataset, loader.collate_fn, seed)
        self._requests = _Requests(loader.batch_sampler, collective)
        self._inner = self.build(self._requests, loader.num_workers, loader.generator)

    @property
    def num_workers(self) -> int:
        return self._loader.num_workers

    def build(self, requests: Any, num_workers: int, generator: Any) -> DataLoader[Any]:
        loader, given = self._loader, {}
        if num_workers:
            given = {
                "prefetch_factor": loader.prefetch_factor,
                "multiprocessing_context": loader.multiprocessing_context,
                "persistent_workers": loader.persistent_workers and not isinstance(requests, list),
            }
        return DataLoader(
            self._dataset,
            batch_sampler=requests,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=_Initialise(loader.worker_init_fn) if num_workers else None,
            generator=generator,
            **given,
        )

    def read(self, epoch: int) -> Iterator[Loaded]:
        """Begin a pass. Its draws are made by now, before the first batch is asked for."""
        self._requests.epoch = epoch
        return self._read(start(self._inner), epoch)

    def _read(self, batches: Iterator[Any], epoch: int) -> Iterator[Loaded]:
        for number, (shares, digest) in enumerate(batches):
            indices = self._requests.issued.popleft()
            found = _Shares(self, shares, indices, epoch, number)
            yield Loaded(len(indices), found.load, found.load_cuts, digest)

    def load_share(self, epoch: int, batch: int, indices: list[Any], replica: int) -> Any:
        """Load the share of a lost worker's replica, or of one that has moved here."""
        return self._load_one(Request(epoch, batch, (self._requests.cut(indices, replica),)))[replica]

    def load_cuts(
        self, epoch: int, batch: int, indices: list[Any], cuts: tuple[tuple[int, int], ...]
    ) -> dict[int, Any]:
        """Load the first samples of a batch once, and collate these parts of them."""
        most = max(stop for _, stop in cuts)
        return self._load_one(Request(epoch, batch, ((0, tuple(indices[:most])),), cuts=cuts))

    def _load_one(self, request: Request) -> dict[int, Any]:
        if not self._loader.num_workers:
            return self._dataset.__getitems__(request)[0]
        # In a process of its own, as ever: the dataset may have been opened by `worker_init_fn`.
        batches = start(self.build([request], 1, torch.Generator()))
        found: dict[int, Any] = next(batches)[0]
        return found


class EvaluationReader:
    """Reads whole batches of a loader, each by one replica. It keeps the order, for replicas of lost workers."""

    def __init__(self, shares: ShareLoader, loader: DataLoader[Any], num_replicas: int) -> None:
        self._shares, self._num_replicas = shares, num_replicas
        self._requests = _WholeRequests(loader.batch_sampler, num_replicas)
        self._inner = shares.build(self._requests, loader.num_workers, loader.generator)
        self._number = 0
        self._is_read = False

    def begin(self, number: int) -> None:
        self._number, self._is_read = number, False

    def read(self, replicas: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        """Yield (replica, number of the batch, batch) for these replicas."""
        if not self._is_read:
            self._is_read = True
            self._requests.number, self._requests.replicas = self._number, tuple(replicas)
            batches = start(self._inner)
        else:
            requests = [self._requests.ask(number) for number in range(len(self._requests.batches))]
            wanted = [request for request in requests if request.shares[0][0] in replicas]
            batches = start(self._shares.build(wanted, min(1, self._shares.num_workers), torch.Generator()))
        wanted_numbers = (n for n in range(10**12) if n % self._num_replicas in replicas)
        for number, (loaded, _) in zip(wanted_numbers, batches, strict=False):
            ((replica, batch),) = loaded.items()
            yield replica, number, batch

    def size_of(self, number: int) -> int:
        return len(self._requests.batches[number])

    @property
    def num_samples(self) -> int:
        return sum(map(len, self._requests.batches))

    def places(self, replica: int) -> list[range]:
        found, start_at = [], 0
        for number, batch in enumerate(self._requests.batches):
            if number % self._num_replicas == replica:
                found.append(range(start_at, start_at + len(batch)))
            start_at += len(batch)
        return found


class _WholeRequests:
    """A batch sampler: the user's own batches, of which it asks for those of some replicas."""

    def __init__(self, sampler: Any, num_replicas: int) -> None:
        self._sampler, self._num_replicas = sampler, num_replicas
        self.number = 0
        self.replicas: tuple[int, ...] = ()
        self.batches: list[list[Any]] = []

    def __iter__(self) -> Iterator[Request]:
        self.batches = []
        return self._ask(iter(self._sampler))

    def _ask(self, batches: Iterator[Any]) -> Iterator[Request]:
        for number, batch in enumerate(batches):
            self.batches.append(list(batch))
            if number % self._num_replicas in self.replicas:
                yield self.ask(number)

    def ask(self, number: int) -> Request:
        return Request(-self.number, number, ((number % self._num_replicas, tuple(self.batches[number])),))

    def __len__(self) -> int:
        return len(self._sampler)


class _Shares:
    """The shares of one batch that were loaded ahead, and a way to the others."""

    def __init__(self, loader: ShareLoader, shares: dict[int, Any], indices: list[Any], epoch: int, batch: int) -> None:
        self._loader, self._shares = loader, shares
        self._indices, self._epoch, self._batch = indices, epoch, batch

    def load(self, replica: int) -> Any:
        if replica not in self._shares:
            self._shares[replica] = self._loader.load_share(self._epoch, self._batch, self._indices, replica)
        return self._shares[replica]

    def load_cuts(self, cuts: tuple[tuple[int, int], ...]) -> dict[int, Any]:
        return self._loader.load_cuts(self._epoch, self._batch, self._indices, cuts)


def _as_it_is(loaded: Any) -> Any:
    return loaded
