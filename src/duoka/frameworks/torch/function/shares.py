"""A DataLoader that loads the samples of this worker's replicas only.

It is built around a batch sampler that wraps the user's own, so that PyTorch's own iterators make all draws: the seed
of the loader's processes, the order, prefetching, persistent workers. The order is that of the plain script.
"""

from __future__ import annotations

import array
import copy
import itertools
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, get_worker_info

from duoka.collectives.collective import Collective
from duoka.data.seeds import derive
from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.torch.loader_processes import start
from duoka.frameworks.torch.randomness import KeptGenerators, seed_all
from duoka.frameworks.torch.tensors import as_bytes

OWN_GENERATOR = -1  # in the place of a digest: the same sample, loaded twice under one seed, differs


@dataclass(frozen=True)
class Request:
    """What one of the loader's processes loads: the shares of some replicas of one global batch."""

    loader_pass: int  # its number in the run
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
        with KeptGenerators():
            if request.cuts:
                return self._load_cuts(request), 0
            for replica, indices in request.shares:
                seed_all(derive("share", self._seed, request.loader_pass, request.batch, replica))
                try:
                    loaded[replica] = self._collate(self._load(indices))
                except Exception as error:
                    # Raised where the share is used, so that all workers hear of it.
                    where = f"in loading the samples of replica {replica}"
                    loaded[replica] = Failed(error if get_worker_info() is None else ExceptionWrapper(where=where))
            return loaded, self._probe() if request.is_probe else 0

    def _load_cuts(self, request: Request) -> dict[int, Any]:
        """Collate several parts of the same samples. Each has copies: a collate_fn may take them apart."""
        ((_, indices),) = request.shares
        loaded: dict[int, Any] = {}
        seed = derive("check", self._seed, request.loader_pass, request.batch)
        seed_all(seed)
        samples = self._load(indices)
        for number, (first, stop) in enumerate(request.cuts):
            seed_all(seed)
            loaded[number] = self._collate(copy.deepcopy(samples[first:stop]))
        return loaded

    def _load(self, indices: Sequence[Any]) -> list[Any]:
        if getattr(self.dataset, "__getitems__", None):
            return list(self.dataset.__getitems__(list(indices)))
        return list(map(operator.getitem, itertools.repeat(self.dataset), indices))

    def _probe(self) -> int:
        """A digest of samples 0, n/2 and n-1: a random_split without a seed is found by it. 0: nothing is known."""
        try:
            count = len(self.dataset)
            digests = [self._digest(index) for index in (0, count // 2, count - 1)]
            if self._digest(0) != digests[0]:
                return OWN_GENERATOR
        except Exception:
            return 0  # a dataset that is asked by names, or has samples that its sampler leaves out
        return zlib.crc32(repr(digests).encode()) or 1

    def _digest(self, index: int) -> int:
        seed_all(derive("probe", self._seed, index))
        return digest_sample(self._load([index])[0], 1)


@dataclass(frozen=True)
class Failed:
    """In the place of a share that could not be loaded."""

    error: Exception | ExceptionWrapper  # wrapped by the loader's processes: not every exception can be sent


def digest_sample(sample: Any, digest: int) -> int:
    """Objects of unknown kinds count for nothing: their text may hold an address."""
    if isinstance(sample, torch.Tensor) and sample.layout is torch.strided:
        return zlib.crc32(as_bytes(sample).cpu().numpy(), digest)
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


class Requests:
    """A batch sampler: the user's own batches as requests for the shares of this worker's replicas, for one pass.

    Batches before `first` are drawn from the sampler, and not loaded.
    """

    def __init__(
        self, batches: Any, collective: Collective, loader_pass: int, first: int = 0, *, is_probed: bool = False
    ) -> None:
        self._batches, self._collective = batches, collective
        self.loader_pass, self.first, self._is_probed = loader_pass, first, is_probed
        self._drawn: Iterator[Any] = iter(())
        self._num_to_skip = first
        self.issued: deque[list[Any]] = deque()  # what was asked for, until it arrives
        self.loaded: Iterator[Any] = iter(())  # what comes of it

    def __iter__(self) -> Iterator[Request]:
        self._drawn = iter(self._batches)  # begun here: a sampler may draw when its iteration begins
        return self._ask()

    def skip(self) -> None:
        """Draw the batches before the first one now, unless that is done."""
        while self._num_to_skip:
            next(self._drawn, None)
            self._num_to_skip -= 1

    def _ask(self) -> Iterator[Request]:
        self.skip()
        for number, batch in enumerate(self._drawn, self.first):
            indices = list(batch)
            self.issued.append(indices)
            shares = []
            for replica in self._collective.replicas:
                if own := cut(indices, self._collective.num_replicas, replica):
                    shares.append((replica, own))
            yield Request(self.loader_pass, number, tuple(shares), is_probe=self._is_probed and number == 0)


def cut(indices: list[Any], num_replicas: int, replica: int) -> tuple[Any, ...]:
    rows = share(len(indices), num_replicas, replica)
    return tuple(indices[rows.start : rows.stop])


def digest_order(indices: list[Any], digest: int = 0) -> int:
    """A digest of the indices of a batch."""
    try:
        return zlib.crc32(array.array("q", indices).tobytes(), digest)
    except (TypeError, OverflowError):  # names, tuples
        return zlib.crc32(repr(indices).encode(), digest)


class WholeRequests:
    """A batch sampler: the user's own batches, of which it asks for those of some replicas.

    Batch i belongs to replica i modulo R.
    """

    def __init__(self, sampler: Any, num_replicas: int, number: int, replicas: Sequence[int]) -> None:
        self._sampler, self._num_replicas, self._number, self._replicas = sampler, num_replicas, number, replicas
        self.batches: list[list[Any]] = []

    def __iter__(self) -> Iterator[Request]:
        return self._ask(iter(self._sampler))

    def _ask(self, batches: Iterator[Any]) -> Iterator[Request]:
        for number, batch in enumerate(batches):
            self.batches.append(list(batch))
            if number % self._num_replicas in self._replicas:
                yield self.ask(number)

    def ask(self, number: int) -> Request:
        return Request(self._number, number, ((number % self._num_replicas, tuple(self.batches[number])),))


class _Switch:
    """The batch sampler of a loader that serves one pass after another: the requests of the pass that begins."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.requests: Any = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self._sampler)


@dataclass(frozen=True)
class Loaded:
    """One global batch: its size, and how to get at a replica's samples."""

    num_samples: int
    load: Callable[[int], Any]
    load_cuts: Callable[[tuple[tuple[int, int], ...]], dict[int, Any]]
    digest: int
    order: int  # a digest of its indices


class ShareLoader:
    """The user's loader with other requests; everything else as it was given. One for all passes, of any purpose."""

    def __init__(self, loader: DataLoader[Any], collective: Collective, seed: int) -> None:
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise MismatchError(
                f"{type(loader).__name__} has an __iter__ of its own: its batches cannot be split between replicas.",
                why="Duoka builds a loader around its dataset and sampler, which would not use that method.",
                do="put what it does into the dataset, the sampler or collate_fn of a plain DataLoader.",
            )
        self._loader, self._collective = loader, collective
        self._dataset = ShareDataset(loader.dataset, loader.collate_fn, seed)
        self._switch = _Switch(loader.batch_sampler)
        self._inner = self._build(self._switch, loader.num_workers, loader.generator)

    def _build(self, requests: Any, num_workers: int, generator: Any) -> DataLoader[Any]:
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

    def begin(self, loader_pass: int, first: int = 0, *, is_probed: bool = False) -> Requests:
        """Begin a pass. What the loader draws at its begin is drawn by now."""
        sampler = self._loader.batch_sampler
        requests = Requests(sampler, self._collective, loader_pass, first, is_probed=is_probed)
        self._switch.requests = requests
        requests.loaded = start(self._inner)
        return requests

    @property
    def lacks_processes(self) -> bool:
        """Whether persistent ones are still to be started, for which a loader draws a number."""
        return self._inner.persistent_workers and self._inner._iterator is None

    def start_processes(self) -> None:
        """Start them, and read nothing."""
        self._switch.requests = ()
        start(self._inner)

    def read(self, requests: Requests) -> Iterator[Loaded]:
        """The batches of a pass that has begun."""
        loader_pass = requests.loader_pass
        for number, (shares, digest) in enumerate(requests.loaded, requests.first):
            indices = requests.issued.popleft()
            found = _Shares(self, shares, indices, loader_pass, number)
            yield Loaded(len(indices), found.load, found.load_cuts, digest, digest_order(indices))

    def read_whole(self, requests: WholeRequests) -> Iterator[Any]:
        """Begin a pass of whole batches."""
        self._switch.requests = requests
        return start(self._inner)

    def read_again(self, requests: list[Request]) -> Iterator[Any]:
        """Read these beside all passes, without a draw: in a process of its own, as `worker_init_fn` may open files."""
        return start(self._build(requests, min(1, self._loader.num_workers), torch.Generator()))

    def load_share(self, loader_pass: int, batch: int, indices: list[Any], replica: int) -> Any:
        """Load the share of a lost worker's replica, or of one that has moved here."""
        own = cut(indices, self._collective.num_replicas, replica)
        return self._load_one(Request(loader_pass, batch, ((replica, own),)))[replica]

    def load_cuts(
        self, loader_pass: int, batch: int, indices: list[Any], cuts: tuple[tuple[int, int], ...]
    ) -> dict[int, Any]:
        """Load the samples that these parts of a batch cover once, and collate each part of them."""
        first, most = min(start for start, _ in cuts), max(stop for _, stop in cuts)
        own = tuple((start - first, stop - first) for start, stop in cuts)
        return self._load_one(Request(loader_pass, batch, ((0, tuple(indices[first:most])),), cuts=own))

    def _load_one(self, request: Request) -> dict[int, Any]:
        if not self._loader.num_workers:
            return self._dataset.__getitems__(request)[0]
        found: dict[int, Any] = next(self.read_again([request]))[0]
        return found


class EvaluationReader:
    """Reads whole batches of a loader, each by one replica. It keeps the order, for replicas of lost workers."""

    def __init__(self, shares: ShareLoader, loader: DataLoader[Any], num_replicas: int, number: int) -> None:
        self._shares, self._loader, self._num_replicas, self._number = shares, loader, num_replicas, number
        self._requests: WholeRequests | None = None

    def read(self, replicas: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        """Yield (replica, number of the batch, batch) for these replicas."""
        if self._requests is None:
            sampler = self._loader.batch_sampler
            self._requests = WholeRequests(sampler, self._num_replicas, self._number, tuple(replicas))
            batches = self._shares.read_whole(self._requests)
        else:
            requests = [self._requests.ask(number) for number in range(len(self._batches))]
            batches = self._shares.read_again([each for each in requests if each.shares[0][0] in replicas])
        wanted_numbers = (number for number in itertools.count() if number % self._num_replicas in replicas)
        # Batches first: a worker without replicas wants none, and draws the whole order all the same.
        for (loaded, _), number in zip(batches, wanted_numbers, strict=False):
            ((replica, batch),) = loaded.items()
            yield replica, number, unwrap(batch)

    @property
    def _batches(self) -> list[list[Any]]:
        return [] if self._requests is None else self._requests.batches

    def size_of(self, number: int) -> int:
        return len(self._batches[number])

    @property
    def num_samples(self) -> int:
        return sum(map(len, self._batches))

    @property
    def order(self) -> int:
        """A digest of the whole order."""
        digest = 0
        for batch in self._batches:
            digest = digest_order(batch, digest)
        return digest

    def places(self, replica: int) -> list[range]:
        found, start_at = [], 0
        for number, batch in enumerate(self._batches):
            if number % self._num_replicas == replica:
                found.append(range(start_at, start_at + len(batch)))
            start_at += len(batch)
        return found


class _Shares:
    """The shares of one batch that were loaded ahead, and a way to the others."""

    def __init__(
        self, loader: ShareLoader, shares: dict[int, Any], indices: list[Any], loader_pass: int, batch: int
    ) -> None:
        self._loader, self._shares = loader, shares
        self._indices, self._loader_pass, self._batch = indices, loader_pass, batch

    def load(self, replica: int) -> Any:
        if replica not in self._shares:
            self._shares[replica] = self._loader.load_share(self._loader_pass, self._batch, self._indices, replica)
        loaded = self._shares[replica]
        return unwrap(loaded) if isinstance(loaded, Failed) else loaded

    def load_cuts(self, cuts: tuple[tuple[int, int], ...]) -> dict[int, Any]:
        return self._loader.load_cuts(self._loader_pass, self._batch, self._indices, cuts)


def unwrap(loaded: Any) -> Any:
    """Raise the error of a share that could not be loaded."""
    if isinstance(loaded, Failed):
        if isinstance(loaded.error, Exception):
            raise loaded.error
        loaded.error.reraise()
    return loaded


def _as_it_is(loaded: Any) -> Any:
    return loaded
