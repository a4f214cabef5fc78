"""Membership: which workers are alive, by seniority, and which of them are juniors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Membership:
    """The workers alive in one generation. The number goes up when one is lost or joins, never down.

    The originals come first, by number; then replacement workers in the order in which they joined. A replacement is
    a junior until it has agreed with the others at a comparison. A junior is never main, and it yields: where it
    differs from the others, it is removed, and the run continues without it.

    >>> membership = Membership(0, (0, 1, 2)).lose({1}).join(1)
    >>> membership
    Membership(generation=2, workers=(0, 2, 1), juniors=(1,))
    >>> membership.find_odd({0: "same", 1: "other", 2: "same"}), membership.find_odd({0: "other", 1: "same", 2: "same"})
    ([1], [])
    >>> membership.promote({1}).juniors
    ()
    """

    generation: int
    workers: tuple[int, ...]
    juniors: tuple[int, ...] = ()

    @property
    def main(self) -> int:
        return self.workers[0]

    def lose(self, lost: Collection[int]) -> Membership:
        workers, juniors = (tuple(w for w in group if w not in lost) for group in (self.workers, self.juniors))
        return Membership(self.generation + 1, workers, juniors)

    def join(self, worker: int) -> Membership:
        """A replacement worker has joined: it is the least senior, and a junior."""
        return Membership(self.generation + 1, (*self.workers, worker), (*self.juniors, worker))

    def promote(self, workers: Collection[int]) -> Membership:
        """These count as originals from now on."""
        return replace(self, juniors=tuple(w for w in self.juniors if w not in workers))

    def find_odd(self, found: Mapping[int, object]) -> list[int]:
        """The workers that differ from the most senior one, if all of them are juniors. Else nobody is to blame.

        All workers with the same membership who see the same come to the same answer.
        """
        known = [worker for worker in self.workers if worker in found]
        odd = [worker for worker in known if found[worker] != found[known[0]]]
        return odd if set(odd) <= set(self.juniors) else []
