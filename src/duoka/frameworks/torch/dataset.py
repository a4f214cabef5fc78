"""Samples that come out the same whoever loads them: generators are seeded from (seed, epoch, sample)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from duoka.data.seeds import derive
from duoka.frameworks.torch.randomness import seeded

Key = tuple[int, Any]  # the epoch, and the index that the sampler gave


class SeededDataset(Dataset[Any]):
    """The user's dataset, asked for (epoch, index). Random augmentation follows the sample, not the worker."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        innermost = dataset
        while isinstance(innermost, Subset):
            innermost = innermost.dataset
        self._is_plain = type(innermost) is TensorDataset  # draws nothing: seeding would be a waste
        self._loads_many = hasattr(innermost, "__getitems__")  # Subset has it always, and passes it on

    def __getitems__(self, keys: list[Key]) -> Samples:
        epoch, first = keys[0]
        number = derive("share", self._seed, epoch, _number(first), len(keys))
        if self._loads_many:
            # For datasets that load several samples at once: seeded once, from the first sample.
            with seeded(number):
                return Samples(self._dataset.__getitems__([index for _, index in keys]), number)
        return Samples([self._load(epoch, index) for epoch, index in keys], number)

    def _load(self, epoch: int, index: Any) -> Any:
        if self._is_plain:
            return self._dataset[index]
        with seeded(derive("sample", self._seed, epoch, _number(index))):
            return self._dataset[index]


class Samples(list[Any]):
    """The samples of one share, and a seed for whoever puts them together."""

    def __init__(self, samples: Any, number: int) -> None:
        super().__init__(samples)
        self.number = number


class SeededCollate:
    """The user's collate function (mixing, masking), seeded by the samples that it puts together."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        assert isinstance(samples, Samples)
        with seeded(samples.number):
            return self._collate(list(samples))


def make_collate(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """PyTorch's own collate function draws nothing: seeding would be a waste."""
    return collate if collate is default_collate else SeededCollate(collate)


def _number(index: Any) -> int:
    return int(index) if isinstance(index, int) else derive(str(index)[:16], hash(index))
