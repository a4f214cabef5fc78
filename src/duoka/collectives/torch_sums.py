"""How the partial sums of one buffer become the total: in the order of the tree, or as the library adds them up.

Each sum is made once for a buffer and a dealing of replicas, with all the memory that it needs, and used in
every step. What the replicas deposited is only read, so that a step can be done again after a loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from duoka.collectives.torch_group import Group
from duoka.topology.placement import Placement
from duoka.topology.tree import Node, additions

# Adding is the same for numbers with and without a sign, and only the former can be added on every device.
_SIGNED = {"uint16": torch.int16, "uint32": torch.int32, "uint64": torch.int64}
# What both libraries add up in its own type; the sums of all others travel in the order of the tree.
_LIBRARY_TYPES = {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}


def add(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    if signed := _SIGNED.get(str(left.dtype).removeprefix("torch.")):
        left, right, out = left.view(signed), right.view(signed), out.view(signed)
    torch.add(left, right, out=out)


class Sum(ABC):
    """One buffer's way to its total, in two rounds of calls to the library, either of which may be empty."""

    result: torch.Tensor

    @abstractmethod
    def send(self, group: Group) -> list[Any]:
        """Begin the first round."""

    @abstractmethod
    def finish(self, group: Group) -> list[Any]:
        """The first round has come to its end: begin the second."""


class OwnSum(Sum):
    """All replicas are here, or there are no numbers: nothing travels."""

    def __init__(self, num_replicas: int, nodes: tuple[Node, ...], parts: Sequence[torch.Tensor]) -> None:
        self._additions = additions(num_replicas, nodes)
        self._given = list(parts)
        self._sums = {left: torch.empty_like(parts[0]) for left, _ in self._additions}
        self.result = self._sums.get(0, parts[0])

    def send(self, group: Group | None = None) -> list[Any]:
        parts = list(self._given)
        for left, right in self._additions:
            add(parts[left], parts[right], out=self._sums[left])
            parts[left] = self._sums[left]
        return []

    def finish(self, group: Group | None = None) -> list[Any]:
        return []


class TreeSum(Sum):
    """In the order of the tree. Each worker adds up one slice of all partial sums, and all gather the slices.

    Bytes travel, so that every type of number can: the partial sums go out in as many calls as the worker with the
    most has of them, which is one unless replicas and workers do not divide evenly.
    """

    def __init__(self, own: dict[Node, torch.Tensor], placement: Placement, worker: int) -> None:
        like = next(iter(own.values()))
        count, self._width = like.numel(), like.element_size()
        workers = placement.workers
        longest = -(-count // len(workers))
        sizes = [max(0, min(longest, count - position * longest)) for position in range(len(workers))]
        self._size = sizes[workers.index(worker)]
        self._gathered = like.new_empty(longest * len(workers))
        self._slice = like.new_empty(longest)
        self.result = self._gathered[:count]
        self._calls: list[tuple[torch.Tensor, torch.Tensor, list[int], list[int]]] = []
        parts: dict[Node, torch.Tensor] = {}
        owned = {w: [node for node in placement.partials if placement.owner(node.start) == w] for w in workers}
        for number in range(max(len(nodes) for nodes in owned.values())):
            senders = [w for w in workers if number < len(owned[w])]
            rows = like.new_empty(len(senders) * self._size)
            for sender, row in zip(senders, rows.view(len(senders), self._size), strict=True):
                parts[owned[sender][number]] = row
            given = own[owned[worker][number]] if worker in senders else like[:0]
            given_sizes = [size * self._width if worker in senders else 0 for size in sizes]
            output_sizes = [self._size * self._width if w in senders else 0 for w in workers]
            self._calls.append((_bytes(rows), _bytes(given), output_sizes, given_sizes))
        self._parts = [parts[node] for node in placement.partials]
        self._additions = additions(placement.num_replicas, placement.partials)

    def send(self, group: Group) -> list[Any]:
        return [group.all_to_all(*call) for call in self._calls]

    def finish(self, group: Group) -> list[Any]:
        *inner, (left, right) = self._additions
        for into, other in inner:
            add(self._parts[into], self._parts[other], out=self._parts[into])
        add(self._parts[left], self._parts[right], out=self._slice[: self._size])
        return [group.all_gather(_bytes(self._gathered), _bytes(self._slice))]


class LibrarySum(Sum):
    """As the library adds up: equal on all workers, but the bits depend on how many there are."""

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        self._own = own
        self.result = torch.empty_like(own[0])
        self._plain = torch.view_as_real(self.result) if self.result.is_complex() else self.result

    @staticmethod
    def can_add(dtype: torch.dtype) -> bool:
        return dtype in _LIBRARY_TYPES or dtype in (torch.complex64, torch.complex128)

    def send(self, group: Group) -> list[Any]:
        self.result.copy_(self._own[0])
        for part in self._own[1:]:
            self.result.add_(part)
        return [group.all_reduce(self._plain)]

    def finish(self, group: Group) -> list[Any]:
        return []


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
