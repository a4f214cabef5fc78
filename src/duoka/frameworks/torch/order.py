"""The global order of an epoch: which rows make up each global batch. The same on every worker."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from duoka.data.seeds import derive
from duoka.errors import MismatchError
from duoka.frameworks.torch.randomness import seeded

# Samplers of PyTorch whose order follows from the seed alone, not from passes before.
_WITHOUT_MEMORY = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_MOST_TIMES, _MOST_BATCHES = 20, 1_000_000  # how often an epoch may come by every sample, and some more


def list_batches(loader: DataLoader[Any], seed: int, epoch: int) -> list[list[Any]]:
    """The global batches of one epoch, as the loader's own samplers give them under a seed of (seed, epoch)."""
    with seeded_order(loader, seed, epoch):
        if loader.batch_sampler is None:
            return [[index] for index in _ending(loader.sampler, loader)]
        return [list(batch) for batch in _ending(loader.batch_sampler, loader)]


def _ending(sampler: Iterable[Any], loader: DataLoader[Any]) -> Iterator[Any]:
    """The order of an epoch is listed before it begins, so it must have an end."""
    dataset: Any = loader.dataset
    most = _MOST_TIMES * (len(dataset) if hasattr(dataset, "__len__") else 0) + _MOST_BATCHES
    for number, item in enumerate(sampler):
        if number > most:
            raise MismatchError(
                f"The {type(sampler).__name__} of a loader has given {number:,} batches, and does not end.",
                why="the order of an epoch is drawn before it begins, the same on all workers.",
                do="let the sampler end after an epoch, and loop over epochs.",
            )
        yield item


def has_own_sampler(loader: DataLoader[Any]) -> bool:
    """Whether the order may depend on how often it was drawn before."""
    samplers = (loader.sampler, loader.batch_sampler)
    return any(sampler is not None and type(sampler) not in _WITHOUT_MEMORY for sampler in samplers)


@contextmanager
def seeded_order(loader: DataLoader[Any], seed: int, epoch: int) -> Iterator[None]:
    """Whatever draws an order draws the same one on every worker."""
    number = derive("order", seed, epoch)
    for generator in _generators(loader):
        generator.manual_seed(number)
    with seeded(number):
        yield


def _generators(loader: DataLoader[Any]) -> list[Any]:
    """Generators the user gave to samplers: they are seeded too, else the order would depend on what ran before."""
    found = {id(g): g for owner in (loader, loader.sampler) if (g := getattr(owner, "generator", None)) is not None}
    return list(found.values())


def digest(batches: Sequence[Sequence[Any]]) -> str:
    """A fingerprint of an order, to compare between workers."""
    return hashlib.sha256(repr([list(batch) for batch in batches]).encode()).hexdigest()[:16]
