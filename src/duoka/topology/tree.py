"""The summation tree: one fixed binary tree over the R replicas.

Floating-point addition is not associative, so equal bits need an equal order. The order is this
tree, for every number of workers: halves of [0, R), recursively. Whoever holds all leaves of a
subtree may add them up alone; the partial sum then stands for the subtree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from duoka.errors import TopologyError

Value = TypeVar("Value")


@dataclass(frozen=True, order=True)
class Node:
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


def fold(
    num_replicas: int,
    nodes: Sequence[Node],
    value_of: Callable[[Node], Value],
    add: Callable[[Value, Value], Value],
) -> Value:
    """Finish the tree from the values of these nodes, which must cover it without overlap.

    `add` is called with the left child's value first.
    """
    given = frozenset(nodes)

    def visit(node: Node) -> Value:
        if node in given:
            return value_of(node)
        assert not node.is_leaf, f"no value for replica {node.start}"
        left, right = node.children
        return add(visit(left), visit(right))

    return visit(root(num_replicas))
