"""How long workers have been in the run: those that have come back are younger than those that were there all along."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Ages:
    """
    >>> ages = Ages()
    >>> ages.learn([(1, 4)])  # worker 1 came back in generation 4
    >>> ages.sort([1, 2, 3])
    [2, 3, 1]
    >>> ages.find_odd({1: "other", 2: "same", 3: "same"}), ages.find_odd({1: "same", 2: "same", 3: "other"})
    ([1], [])
    """

    def __init__(self) -> None:
        self.since: dict[int, int] = {}  # the generations in which workers came back

    def learn(self, since: Iterable[tuple[int, int]]) -> None:
        self.since |= {int(worker): int(generation) for worker, generation in since}

    def sort(self, workers: Iterable[int]) -> list[int]:
        """Those first that have been there longest."""
        return sorted(workers, key=lambda worker: (self.since.get(worker, 0), worker))

    def is_younger(self, worker: int, others: Iterable[int]) -> bool:
        """Whether one of these has been there longer."""
        return any(self.since.get(other, 0) < self.since.get(worker, 0) for other in others)

    def has_anybody_come_back(self, workers: Iterable[int]) -> bool:
        return bool(self.since) and any(worker in self.since for worker in workers)

    def find_odd(self, deeds: Mapping[int, object]) -> list[int]:
        """Those who do otherwise than the worker that has been there longest, if all of them came back after it.

        All workers who see the same deeds come to the same answer.
        """
        oldest = self.sort(deeds)[0]
        odd = [worker for worker, deed in deeds.items() if deed != deeds[oldest]]
        return odd if all(self.is_younger(worker, [oldest]) for worker in odd) else []
