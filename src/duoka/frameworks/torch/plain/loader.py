"""A prepared loader: a DataLoader over which a plain loop sees the samples of its worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


class PreparedLoader(DataLoader[Any]):
    """The user's loader in everything but its iteration."""

    unprepared: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any], walk: Callable[[], Iterator[Any]]) -> None:
        self.__dict__.update(vars(loader))  # not DataLoader's own __init__: it would check and make everything again
        self.unprepared, self._walk = loader, walk

    def __iter__(self) -> Iterator[Any]:
        return self._walk()

    def __len__(self) -> int:
        """Global batches."""
        return len(self.unprepared)


def prepare_loader(loader: DataLoader[Any], walk: Callable[[], Iterator[Any]]) -> PreparedLoader:
    """An instance of the loader's own class, where that is a subclass: its methods stay."""
    kind: Any = type(loader)
    if kind is DataLoader:
        return PreparedLoader(loader, walk)
    made: PreparedLoader = type(f"Prepared{kind.__name__}", (PreparedLoader, kind), {})(loader, walk)
    return made
