"""Plain sums over replicas: small ones in one meeting, through the mailslots; large ones as an exchange."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from duoka.collectives.arrays import Array, add, weigh
from duoka.collectives.staging import SLOT_BYTES
from duoka.topology.tree import Node, fold, subtrees

if TYPE_CHECKING:
    from duoka.collectives.shm import SharedMemory

_WEIGHT = struct.Struct("<d")


@dataclass(frozen=True)
class Terms:
    """What this worker adds: a value for each of its replicas, all of one shape, and what each one weighs."""

    arrays: Sequence[Array]
    weights: Sequence[float | None]
    dtype: np.dtype[Any]  # in which they are added up


def reduce(collective: SharedMemory, call: str, terms: Terms, deadline_s: float | None) -> tuple[Array, float]:
    """The sum over all replicas, flat, and the sum of their weights. May be shared, until it is released."""
    is_small = terms.arrays[0].size * terms.dtype.itemsize <= SLOT_BYTES
    return (_reduce_small if is_small else _reduce_large)(collective, call, terms, deadline_s)


def _reduce_small(collective: SharedMemory, call: str, terms: Terms, deadline_s: float | None) -> tuple[Array, float]:
    staging, num_replicas, dtype = collective.staging, collective.num_replicas, terms.dtype
    number = collective.begin(call)
    parts: dict[Node, Array] = {}
    for replica, array, weight in zip(collective.replicas, terms.arrays, terms.weights, strict=True):
        parts[Node(replica, replica + 1)] = part = np.empty(array.size, dtype)
        weigh(array, weight, part)
        staging.write_note(number, replica, _pack_weight(weight))
    for share in collective.placement.shares:
        if share.worker == collective.worker:
            for node in subtrees(num_replicas, share.replicas):
                total = _fold_below(node, parts)
                staging.array(number, node.start, dtype, total.size)[:] = total
    placement = collective.meet_once(number, deadline_s, lambda: False)
    size = terms.arrays[0].size
    nodes = placement.partials
    staged = [staging.array(number, node.start, dtype, size) for node in nodes]
    result = fold(num_replicas, nodes, staged, add)
    notes = [staging.read_note(number, replica) for replica in range(num_replicas)]
    collective.complete(number)
    return result, _total_weight(notes)


def _reduce_large(collective: SharedMemory, call: str, terms: Terms, deadline_s: float | None) -> tuple[Array, float]:
    replicas = collective.replicas
    buffer = collective.scratch(terms.arrays[0].size, terms.dtype, "all_reduce")
    exchange = collective.open_exchange(call, [buffer], deadline_s, can_redo=False)
    if collective.dealing.is_lost(collective.next_number) or collective.replicas != replicas:
        with collective.failing_for_good():
            raise collective.lost_error(None, collective.next_number)
    for replica, array, weight in zip(replicas, terms.arrays, terms.weights, strict=True):
        weigh(array, weight, exchange.slot(buffer, replica))
        exchange.deposit(replica, _pack_weight(weight))
    exchange.commit(deadline_s)
    return exchange.result(buffer), _total_weight(exchange.notes)


def _pack_weight(weight: float | None) -> bytes:
    return _WEIGHT.pack(1.0 if weight is None else weight)


def _total_weight(notes: Sequence[bytes]) -> float:
    """The notes of all replicas, in order."""
    leaves = tuple(Node(r, r + 1) for r in range(len(notes)))
    weights = [float(_WEIGHT.unpack(note)[0]) for note in notes]
    return fold(len(notes), leaves, weights, lambda left, right: left + right)


def _fold_below(node: Node, parts: dict[Node, Array]) -> Array:
    """The sum of a whole subtree."""
    if node.is_leaf:
        return parts[node]
    left, right = (_fold_below(child, parts) for child in node.children)
    return left + right
