"""`strategy.batches`: one handle per global batch. Each replica's samples are loaded where they are needed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.torch.function import arguments
from duoka.frameworks.torch.function.shares import OWN_GENERATOR, Loaded, ShareLoader
from duoka.frameworks.torch.loader_processes import start
from duoka.frameworks.torch.nested import map_tensors
from duoka.frameworks.torch.single_samples import count_last_batch

Load = Callable[[int], Any]  # a replica's samples
Cuts = tuple[tuple[int, int], ...]
LoadCuts = Callable[[Cuts], dict[int, Any]]


class Batch:
    """A handle of one global batch, for `strategy.backward`. It can be used until the next one is drawn."""

    last_size = 0  # with the first batch: samples of the loader's last one, if it is smaller

    def __init__(
        self,
        num_samples: int,
        index: int,
        epoch: int,
        load: Load,
        load_cuts: LoadCuts,
        device: torch.device,
        samples_digest: int = 0,
        order_digest: int = 0,
    ) -> None:
        self.num_samples, self._load, self._load_cuts = num_samples, load, load_cuts
        self._move = operator.methodcaller("to", device, non_blocking=True)
        self.index, self.epoch = index, epoch
        self.order_digest = order_digest  # of the indices of the samples
        self.samples_digest = samples_digest  # of samples that all workers must find alike; 0: none were looked at
        self._is_current = True
        self._moved: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.num_samples

    @property
    def title(self) -> str:
        """To be compared between workers."""
        return f"batch {self.index} of pass {self.epoch} ({self.num_samples} samples)"

    def load(self, replica: int) -> Any:
        """A replica's samples, on the device."""
        if replica not in self._moved:
            value = self._load(replica)
            if type(value) in (tuple, list):  # one Python call for tensors side by side: this happens in every step
                move = self._move
                value = [move(v) if isinstance(v, torch.Tensor) else map_tensors(v, move) for v in value]
            else:
                value = map_tensors(value, self._move)
            self._moved[replica] = value
        return self._moved[replica]

    def load_cuts(self, cuts: Cuts) -> dict[int, Any]:
        """These parts of the first samples of the batch, each by itself: for the check of a function's first call."""
        return {number: map_tensors(part, self._move) for number, part in self._load_cuts(cuts).items()}

    def check_current(self) -> None:
        if not self._is_current:
            raise MismatchError(
                f"strategy.backward was passed {self.title}, and a later batch of its loader has been drawn since.",
                why="a handle can be used until the next batch of its loader is drawn.",
                do="use it within its turn of the loop; several batches in one call need loaders of their own.",
            )

    def end(self) -> None:
        self._is_current = False
        self._moved.clear()
        self._load = self._load_cuts = _gone

    def __iter__(self) -> Iterator[Any]:
        raise MismatchError(
            "A batch of strategy.batches was taken apart.",
            why="it is a handle: every replica's samples are loaded where they are needed.",
            do="pass it on: strategy.backward(loss_of, batch), with `def loss_of(x, y): ...`.",
        )


def _gone(_: Any) -> Any:
    raise AssertionError("this batch has ended")


class Batches:
    """The global batches of a loader, pass by pass."""

    def __init__(
        self,
        loader: DataLoader[Any],
        find_shares: Callable[[DataLoader[Any]], ShareLoader | None],
        num_replicas: int,
        device: torch.device,
        begin: Callable[[], None],
        tell: Callable[..., None],
    ) -> None:
        self._loader, self._find_shares, self._num_replicas = loader, find_shares, num_replicas
        self._device, self._begin, self._tell = device, begin, tell
        self._epoch = -1
        self._last: Batch | None = None

    def __len__(self) -> int:
        """Global batches."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        self._check_batch_size()
        self._begin()
        self._epoch += 1
        # Begun here, not at the first batch: what an iterator draws when it is made is drawn in the script's order.
        if (shares := self._find_shares(self._loader)) is None:
            batches = self._read_whole(start(self._loader))
        else:
            batches = self._read_shares(shares.read(self._epoch))
        return self._hand_out(batches, self._epoch)

    def _hand_out(self, batches: Iterator[Batch], epoch: int) -> Iterator[Batch]:
        for batch in batches:
            if epoch != self._epoch:
                raise MismatchError(
                    "Two iterators over the same strategy.batches were drawn from in turns.",
                    do="prepare a loader for each of them.",
                )
            if self._last is not None:
                self._last.end()
            self._last = batch
            if batch.index == 0:
                batch.last_size = count_last_batch(self._loader)
            yield batch

    def _read_shares(self, shares: Iterator[Loaded]) -> Iterator[Batch]:
        for index, loaded in enumerate(shares):
            digest = loaded.digest
            if digest == OWN_GENERATOR:
                digest = 0
                self._tell(
                    "a sample of the loader's dataset differs from one time to the next, because the dataset draws from"
                    " a generator of its own: runs do not repeat bit for bit. Draw from the global generator of torch,"
                    " NumPy or Python"
                )
            load, load_cuts = loaded.load, loaded.load_cuts
            yield Batch(loaded.num_samples, index, self._epoch, load, load_cuts, self._device, digest, loaded.order)

    def _read_whole(self, batches: Iterator[Any]) -> Iterator[Batch]:
        """With one replica, and of streams: every worker reads everything."""
        num_replicas = self._num_replicas
        for index, batch in enumerate(batches):
            parts = batch if type(batch) in (tuple, list) else [batch]
            num_samples = _count(parts, num_replicas)
            digest = arguments.fingerprint(parts, is_whole=False) if num_replicas > 1 else 0
            cut = _Cut(batch, num_samples, num_replicas)
            yield Batch(num_samples, index, self._epoch, cut, cut.load_cuts, self._device, digest)

    def _check_batch_size(self) -> None:
        size = self._loader.batch_size or getattr(self._loader.batch_sampler, "batch_size", None)
        if isinstance(size, int) and size < self._num_replicas:
            raise MismatchError(
                f"A batch of {size} samples cannot be split between {self._num_replicas} replicas.",
                why="batch_size is global: every replica takes its share of each batch.",
                do=f"use batch_size={self._num_replicas} or more, or fewer replicas.",
            )


class _Cut:
    """A whole batch, from which a replica's samples are cut."""

    def __init__(self, batch: Any, num_samples: int, num_replicas: int) -> None:
        self._batch, self._num_samples, self._num_replicas = batch, num_samples, num_replicas

    def __call__(self, replica: int) -> Any:
        if self._num_replicas == 1:
            return self._batch
        rows = share(self._num_samples, self._num_replicas, replica)
        return self._cut(rows.start, rows.stop)

    def load_cuts(self, cuts: Cuts) -> dict[int, Any]:
        return {number: self._cut(start, stop) for number, (start, stop) in enumerate(cuts)}

    def _cut(self, start: int, stop: int) -> Any:
        if type(self._batch) is list:
            return [arguments.cut(part, start, stop) for part in self._batch]
        return arguments.cut(self._batch, start, stop)


def _count(parts: Any, num_replicas: int) -> int:
    if num_replicas == 1:
        return _count_loosely(parts)
    if (count := arguments.count_samples(parts)) is None:
        raise MismatchError(
            "A batch of the loader has nothing that could be cut by samples.",
            do="let the loader give tensors whose first dimension is the samples.",
        )
    return count


def _count_loosely(parts: Any) -> int:
    """With one replica nothing is cut: the length of the first tensor, for metrics that are means over samples."""
    try:
        return arguments.count_samples(parts) or 1
    except MismatchError:
        lengths = (len(part) for part in parts if isinstance(part, torch.Tensor) and part.ndim)
        return next(lengths, 1)
