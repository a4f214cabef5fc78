"""The summation tree: one fixed binary tree over the R replicas.

Floating-point addition is not associative, so equal bits need an equal order. The order is this
tree, for every number of workers: halves of [0, R), recursively. Whoever holds all leaves of a
subtree may add them up alone; the partial sum then stands for the subtree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from duoka.errors import TopologyError

Value = TypeVar("Value")


class Node(NamedTuple):
    """The subtree over the replicas start, ..., stop - 1."""

    start: int
    stop: int

    @property
    def is_leaf(self) -> bool:
        return self.stop - self.start == 1

    @property
    def children(self) -> tuple[Node, Node]:
        middle = (self.start + self.stop) // 2
        return Node(self.start, middle), Node(middle, self.stop)

    def replicas(self) -> range:
        return range(self.start, self.stop)


def root(num_replicas: int) -> Node:
    if num_replicas < 1:
        raise TopologyError(
            f"{num_replicas} replicas: there is nothing to train.",
            do="use replicas=1 or more, or leave it out.",
        )
    return Node(0, num_replicas)


@lru_cache(maxsize=256)
def parents(num_replicas: int) -> dict[Node, Node]:
    """Each node of the tree but the root, with its parent."""
    found: dict[Node, Node] = {}

    def visit(node: Node) -> None:
        if not node.is_leaf:
            for child in node.children:
                found[child] = node
                visit(child)

    visit(root(num_replicas))
    return found


def subtrees(num_replicas: int, replicas: Collection[int]) -> tuple[Node, ...]:
    """The largest subtrees that lie wholly within these replicas, from left to right.

    >>> subtrees(8, [0, 1, 2])
    (Node(start=0, stop=2), Node(start=2, stop=3))
    """
    owned = frozenset(replicas)

    def visit(node: Node) -> Iterator[Node]:
        if owned.issuperset(node.replicas()):
            yield node
        elif not node.is_leaf:
            for child in node.children:
                yield from visit(child)

    return tuple(visit(root(num_replicas)))


@lru_cache(maxsize=256)
def additions(num_replicas: int, nodes: tuple[Node, ...]) -> tuple[tuple[int, int], ...]:
    """How to finish the tree from these nodes, which cover it from left to right: positions to add, in order.

    (i, j) means: add the value at j to the value at i. The total ends up at position 0.

    >>> additions(4, (Node(0, 2), Node(2, 3), Node(3, 4)))
    ((1, 2), (0, 1))
    """
    position_of = {node: position for position, node in enumerate(nodes)}
    pairs: list[tuple[int, int]] = []

    def visit(node: Node) -> int:
        if node in position_of:
            return position_of[node]
        assert not node.is_leaf, f"no value for replica {node.start}"
        left, right = (visit(child) for child in node.children)
        pairs.append((left, right))
        return left

    visit(root(num_replicas))
    return tuple(pairs)


def fold(
    num_replicas: int, nodes: tuple[Node, ...], values: Sequence[Value], add: Callable[[Value, Value], Value]
) -> Value:
    """The total of these nodes' values, in the order of the tree; the left term is given first."""
    parts = list(values)
    for left, right in additions(num_replicas, nodes):
        parts[left] = add(parts[left], parts[right])
    return parts[0]
