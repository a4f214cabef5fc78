"""Generations: which workers are alive, and since when."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Membership:
    """The workers alive in one generation. The number goes up when one is lost or joins, never down.

    >>> Membership(0, (0, 1, 2)).lose({1})
    Membership(generation=1, workers=(0, 2))
    """

    generation: int
    workers: tuple[int, ...]

    def lose(self, lost: Collection[int]) -> Membership:
        return Membership(self.generation + 1, tuple(w for w in self.workers if w not in lost))

    def join(self, worker: int) -> Membership:
        return Membership(self.generation + 1, tuple(sorted({*self.workers, worker})))
