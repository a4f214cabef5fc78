"""Samples that come out the same whoever loads them: generators are seeded from (seed, epoch, sample)."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, TensorDataset

from duoka.data.seeds import derive
from duoka.frameworks.torch.randomness import seeded


class SeededDataset(Dataset[Any]):
    """The user's dataset, asked for (epoch, index). Random augmentation follows the sample, not the worker."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._is_plain = type(dataset) is TensorDataset  # draws nothing: seeding would be a waste

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        epoch, index = key
        if self._is_plain:
            return self._dataset[index]
        with seeded(derive("sample", self._seed, epoch, _number(index))):
            return self._dataset[index]


class SeededBatchDataset(SeededDataset):
    """For datasets that load several samples at once: seeded once, from the first sample."""

    def __getitems__(self, keys: list[tuple[int, Any]]) -> Any:
        epoch, first = keys[0]
        with seeded(derive("sample", self._seed, epoch, _number(first))):
            return self._dataset.__getitems__([index for _, index in keys])


def _number(index: Any) -> int:
    return int(index) if isinstance(index, int) else derive(str(index)[:16], hash(index))


def make_seeded(dataset: Any, seed: int) -> SeededDataset:
    kind = SeededBatchDataset if hasattr(dataset, "__getitems__") else SeededDataset
    return kind(dataset, seed)
