"""The global order of an epoch: which rows make up each global batch. The same on every worker."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from duoka.data.seeds import derive
from duoka.frameworks.torch.randomness import seeded


def list_batches(loader: DataLoader[Any], seed: int, epoch: int) -> list[list[Any]]:
    """The global batches of one epoch, as the loader's own samplers give them under a seed of (seed, epoch)."""
    with seeded_order(loader, seed, epoch):
        if loader.batch_sampler is not None:
            return [list(batch) for batch in loader.batch_sampler]
        return [[index] for index in loader.sampler]


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
