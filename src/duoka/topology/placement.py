"""Which worker runs which replica."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from duoka.errors import TopologyError
from duoka.topology.tree import Node, subtrees


@dataclass(frozen=True)
class Share:
    """Replicas that one worker adds up among themselves."""

    worker: int
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Shares that together hold every replica once. A worker may hold several, after a loss."""

    num_replicas: int
    shares: tuple[Share, ...]

    @cached_property
    def workers(self) -> tuple[int, ...]:
        return tuple(sorted({share.worker for share in self.shares}))

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The first replica of each share."""
        return tuple(share.replicas[0] for share in self.shares)

    def counts(self) -> dict[int, int]:
        return {worker: len(self.replicas_of(worker)) for worker in self.workers}

    def replicas_of(self, worker: int) -> tuple[int, ...]:
        return self._replicas_by_worker.get(worker, ())

    @cached_property
    def _replicas_by_worker(self) -> dict[int, tuple[int, ...]]:
        return {
            worker: tuple(sorted(r for share in self.shares if share.worker == worker for r in share.replicas))
            for worker in self.workers
        }

    def owner(self, replica: int) -> int:
        return self.share_of(replica).worker

    def share_of(self, replica: int) -> Share:
        return self._share_by_replica[replica]

    @cached_property
    def _share_by_replica(self) -> dict[int, Share]:
        return {replica: share for share in self.shares for replica in share.replicas}

    @cached_property
    def partials(self) -> tuple[Node, ...]:
        """The subtrees whose sums the workers exchange, from left to right."""
        return tuple(sorted(node for share in self.shares for node in subtrees(self.num_replicas, share.replicas)))

    def without(self, lost: Collection[int]) -> Placement:
        """Move only the replicas of the lost workers; what the others hold stays as it is.

        Each moved replica goes to the worker with the fewest, the lowest number first. Moved replicas
        become shares of their own: sums that a survivor has already handed in stay untouched.

        >>> place(4, [0, 1, 2]).without({0}).counts()
        {1: 2, 2: 2}
        """
        kept = tuple(share for share in self.shares if share.worker not in lost)
        if not kept:
            raise TopologyError("No worker is left.", why=f"all of {len(self.workers)} workers were lost.")
        load = dict.fromkeys(sorted({share.worker for share in kept}), 0)
        for share in kept:
            load[share.worker] += len(share.replicas)
        moved: dict[int, list[int]] = {}
        for replica in sorted(r for share in self.shares if share.worker in lost for r in share.replicas):
            heir = min(load, key=lambda worker: (load[worker], worker))
            load[heir] += 1
            moved.setdefault(heir, []).append(replica)
        return Placement(self.num_replicas, kept + tuple(Share(w, tuple(rs)) for w, rs in sorted(moved.items())))


def place(num_replicas: int, workers: Sequence[int]) -> Placement:
    """Decide which worker runs each logical replica.

    Replicas are dealt in order, as evenly as possible. The answer depends only on the
    arguments, so every worker reaches it alone, without a message.

    >>> place(8, [0, 1, 2]).counts()
    {0: 3, 1: 3, 2: 2}
    """
    if not workers:
        raise TopologyError("No worker to place replicas on.", do="use devices=1 or more.")
    if num_replicas < 1:
        raise TopologyError(
            f"{num_replicas} replicas: there is nothing to train.",
            do="use replicas=1 or more, or leave it out.",
        )
    if num_replicas < len(workers):
        raise TopologyError(
            f"{_count(num_replicas, 'replica')} cannot be placed on {len(workers)} workers.",
            why="a worker with no replica would wait at every step and add nothing.",
            do=f"use at most {_count(num_replicas, 'device')}, or set replicas={len(workers)} before training starts.",
        )
    each, rest = divmod(num_replicas, len(workers))
    shares, start = [], 0
    for position, worker in enumerate(workers):
        stop = start + each + (position < rest)
        shares.append(Share(worker, tuple(range(start, stop))))
        start = stop
    return Placement(num_replicas, tuple(shares))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
