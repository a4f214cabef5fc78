"""The collective of one host: workers that share memory, and wake one another through the kernel.

One worker is the same code with nobody to wait for and memory of its own (see `solo.py`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from duoka.collectives.arena import Arena
from duoka.collectives.arrays import Array, as_array, sum_dtype, weigh
from duoka.collectives.buffers import SharedBuffer
from duoka.collectives.collective import Buffer, Collective, Op
from duoka.collectives.exchange import Moment, SharedExchange
from duoka.collectives.meeting import ARRIVED, TAKEN, Decision, Meeting, Regrouped
from duoka.collectives.staging import SLOT_BYTES, Staging
from duoka.errors import MismatchError, WorkerLost
from duoka.topology.placement import Placement, place
from duoka.topology.tree import Node, fold, subtrees

_WEIGHT = struct.Struct("<d")


def _no_moment(name: str) -> None:
    pass


class SharedMemory(Collective):
    def __init__(
        self,
        meeting: Meeting,
        arena: Arena,
        num_replicas: int,
        *,
        deadline_s: float = 60.0,
        moment: Moment = _no_moment,
        describe: Callable[[int], str] = "worker {}".format,
    ) -> None:
        self.worker = meeting.worker
        self.num_replicas = num_replicas
        self.meeting = meeting
        self.deadline_s = deadline_s
        self.moment = moment  # called at every point where a worker could die; tests let it die there
        self.staging = Staging(arena, num_replicas)
        self._arena = arena
        self._describe = describe
        self._dealt = self._placement = place(num_replicas, meeting.membership.workers)
        self._deal_anew = False
        self._adopt_later: list[Decision] = []
        self._held = 0
        self._number = 0
        self._scratch: dict[tuple[int, np.dtype[Any]], SharedBuffer] = {}

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def homes(self) -> tuple[int, ...]:
        """The first replica of each share as they were dealt; unchanged while lost replicas move."""
        return tuple(share.replicas[0] for share in self._dealt.shares)

    # What a call consists of.

    def begin(self, description: str) -> int:
        """Number the next call and say what it is. Ends the validity of a shared result."""
        self.release()
        self._number += 1
        self.meeting.begin(self._number, description.encode())
        return self._number

    def compare_calls(self, number: int) -> None:
        """All workers see the same calls here, so either all of them raise or none."""
        calls = self.meeting.calls(number)
        if len(set(calls.values())) > 1:
            self.complete(number)
            listing = "\n".join(f"{self._describe(w)}: {call.decode(errors='replace')}" for w, call in calls.items())
            raise MismatchError(
                f"The workers did not call the same thing (call {number}, step {self.meeting.steps}).",
                why=listing,
                do="let every worker run the same calls with the same shapes and types.",
            )

    def complete(self, number: int) -> None:
        self.meeting.complete(number)

    def adopt(self, decision: Decision) -> None:
        """After a loss only the lost replicas move, until the border of the step in which the furthest survivor is.

        One that takes a result late is still a step behind: it moves them once it has come to that step.
        """
        if decision.steps > self.meeting.steps:
            self._adopt_later.append(decision)
        else:
            self._placement = self._placement.without(decision.lost)
            self._deal_anew = True

    def end_step(self) -> None:
        self.meeting.steps += 1
        if self._deal_anew:
            self._dealt = self._placement = place(self.num_replicas, self._placement.workers)
            self._deal_anew = False
        postponed, self._adopt_later = self._adopt_later, []
        for decision in postponed:
            self.adopt(decision)

    def hold(self, number: int) -> None:
        self._held = number

    def release(self) -> None:
        if self._held:
            self.meeting.say(self._held, TAKEN)
            self._held = 0

    def _meet_once(self, number: int, deadline_s: float | None, can_redo: Callable[[], bool]) -> Placement:
        """The one meeting of a small call. Returns who had placed what when it was completed."""
        while True:
            try:
                self.moment("arriving")
                self.meeting.meet(number, ARRIVED, self._deadline(deadline_s))
                self.compare_calls(number)
                placement = self._placement
                break
            except Regrouped as regrouped:
                placement = self._placement
                self.adopt(regrouped.decision)
                if regrouped.decision.completed >= number:
                    break
                if not can_redo():
                    raise self.lost_error(regrouped.decision, number) from None
        return placement

    def _deadline(self, deadline_s: float | None) -> float:
        return self.deadline_s if deadline_s is None else deadline_s

    def lost_error(self, decision: Decision, number: int) -> WorkerLost:
        names = ", ".join(self._describe(w) for w in decision.lost)
        return WorkerLost(
            f"{names} was lost in call {number} at step {self.meeting.steps}, with the values it was to give.",
            why="a plain collective cannot compute another worker's value again.",
            do="exchange what a step needs within the step (strategy.step, Exchange): there lost replicas are redone.",
        )

    # The calls.

    def barrier(self, *, deadline_s: float | None = None) -> None:
        number = self.begin("barrier")
        self._meet_once(number, deadline_s, lambda: True)
        self.complete(number)

    def buffer(self, count: int, dtype: Any) -> SharedBuffer:
        return SharedBuffer(self._arena, self.num_replicas, int(count), dtype)

    def exchange(self, buffers: Sequence[Buffer], name: str = "", deadline_s: float | None = None) -> SharedExchange:
        shared = [buffer for buffer in buffers if isinstance(buffer, SharedBuffer)]
        assert len(shared) == len(buffers), "buffers come from this collective's buffer()"
        sizes = ", ".join(buffer.title for buffer in shared)
        return self._open_exchange(f"exchange {name} of {sizes}", shared, deadline_s, can_redo=True)

    def _open_exchange(
        self, call: str, buffers: Sequence[SharedBuffer], deadline_s: float | None, *, can_redo: bool
    ) -> SharedExchange:
        self.release()
        self._wait_until_taken(max((buffer.last_exchange for buffer in buffers), default=0), deadline_s)
        return SharedExchange(self, buffers, call, can_redo=can_redo)

    def _wait_until_taken(self, number: int, deadline_s: float | None) -> None:
        while number:
            try:
                return self.meeting.wait(number, TAKEN, self._deadline(deadline_s))
            except Regrouped as regrouped:
                self.adopt(regrouped.decision)

    def all_reduce(
        self,
        values: Sequence[Any],
        op: Op = "sum",
        *,
        weights: Sequence[float] | None = None,
        out: Any = None,
        deadline_s: float | None = None,
    ) -> Array:
        arrays = [as_array(value) for value in self._check_given(values, "values")]
        if weights is None:
            weights = [1.0] * len(arrays) if op == "mean" else None
        given: list[float | None] = [None] * len(arrays) if weights is None else list(map(float, weights))
        self._check_given(given, "weights")
        like = arrays[0]
        if any(a.shape != like.shape or a.dtype != like.dtype for a in arrays):
            raise MismatchError(f"Values of one call differ: {[(a.shape, str(a.dtype)) for a in arrays]}.")
        if op == "mean" and like.dtype.kind in "iu":
            raise MismatchError(
                f"The mean of {like.dtype} values is not a {like.dtype}.", do="convert to float64 first."
            )
        dtype = sum_dtype(like.dtype)
        call = f"all_reduce {op} of {like.dtype}{list(like.shape)}"
        reduce = self._reduce_small if like.size * dtype.itemsize <= SLOT_BYTES else self._reduce_large
        flat, total = reduce(call, arrays, given, dtype, deadline_s)
        result = _deliver(flat, like, out, total if op == "mean" else None)
        self.release()
        return result

    def _check_given(self, values: Sequence[Any], what: str) -> Sequence[Any]:
        if len(values) != len(self.replicas):
            raise MismatchError(
                f"{len(values)} {what} for the {len(self.replicas)} replicas of {self._describe(self.worker)}.",
                do="give one for each replica that this worker runs, in order.",
            )
        return values

    def _reduce_small(
        self,
        call: str,
        arrays: list[Array],
        weights: list[float | None],
        dtype: np.dtype[Any],
        deadline_s: float | None,
    ) -> tuple[Array, float]:
        number = self.begin(call)
        parts: dict[Node, Array] = {}
        for replica, array, weight in zip(self.replicas, arrays, weights, strict=True):
            parts[Node(replica, replica + 1)] = part = np.empty(array.size, dtype)
            weigh(array, weight, part)
            self.staging.write_note(number, replica, _WEIGHT.pack(1.0 if weight is None else weight))
        for share in self._placement.shares:
            if share.worker == self.worker:
                for node in subtrees(self.num_replicas, share.replicas):
                    total = _fold_below(node, parts)
                    self.staging.array(number, node.start, dtype, total.size)[:] = total
        placement = self._meet_once(number, deadline_s, lambda: False)
        size = arrays[0].size
        nodes = placement.partials
        staged = [self.staging.array(number, node.start, dtype, size) for node in nodes]
        result = fold(self.num_replicas, nodes, staged, np.add)
        notes = [self.staging.read_note(number, replica) for replica in range(self.num_replicas)]
        self.complete(number)
        return result if len(nodes) > 1 else result.copy(), self._total_weight(notes)

    def _reduce_large(
        self,
        call: str,
        arrays: list[Array],
        weights: list[float | None],
        dtype: np.dtype[Any],
        deadline_s: float | None,
    ) -> tuple[Array, float]:
        key = arrays[0].size, dtype
        if key not in self._scratch:
            self._scratch[key] = self.buffer(*key)
        buffer = self._scratch[key]
        exchange = self._open_exchange(call, [buffer], deadline_s, can_redo=False)
        for replica, array, weight in zip(self.replicas, arrays, weights, strict=True):
            weigh(array, weight, buffer.slot(replica))
            exchange.deposit(replica, _WEIGHT.pack(1.0 if weight is None else weight))
        exchange.commit(deadline_s)
        return exchange.result(buffer), self._total_weight(exchange.notes)

    def _total_weight(self, notes: Sequence[bytes]) -> float:
        leaves = tuple(Node(r, r + 1) for r in range(self.num_replicas))
        weights = [float(_WEIGHT.unpack(note)[0]) for note in notes]
        return fold(self.num_replicas, leaves, weights, lambda left, right: left + right)

    def all_gather(self, values: Sequence[Any], *, deadline_s: float | None = None) -> list[Array]:
        arrays = [np.ascontiguousarray(as_array(v)) for v in self._check_given(values, "values")]
        mine = dict(zip(self.replicas, arrays, strict=True))
        number = self.begin("all_gather")
        for replica, array in mine.items():
            self.staging.write_note(number, replica, _header(array))
            _put(self.staging.slot(number, replica), array, 0)
        self._meet_once(number, deadline_s, lambda: False)
        headers = [json.loads(self.staging.read_note(number, r)) for r in range(self.num_replicas)]
        results = [np.empty(header["shape"], _dtype(header["dtype"])) for header in headers]
        rounds = -(-max(array.nbytes for array in results) // SLOT_BYTES)
        for position in range(max(1, rounds)):
            start = position * SLOT_BYTES
            if position > 0:
                self.complete(number)
                number = self.begin(f"all_gather, part {position}")
                for replica, array in mine.items():
                    _put(self.staging.slot(number, replica), array, start)
                self._meet_once(number, deadline_s, lambda: False)
            for replica, array in enumerate(results):
                _get(self.staging.slot(number, replica), array, start)
        self.complete(number)
        return results

    def broadcast(self, value: Any = None, *, root: int = 0, deadline_s: float | None = None) -> Array:
        is_sender = root in self.replicas
        source = np.ascontiguousarray(as_array(value)) if is_sender else None
        number = self.begin(f"broadcast from replica {root}")
        wide = self.staging.wide_bytes
        if source is not None:
            self.staging.write_note(number, root, _header(source))
            _put(self.staging.wide(number), source, 0)
        self._meet_once(number, deadline_s, lambda: is_sender or root not in self._lost_replicas())
        header = json.loads(self.staging.read_note(number, root))
        result = np.empty(header["shape"], _dtype(header["dtype"])) if source is None else source
        for start in range(0, max(1, result.nbytes), wide):
            if start > 0:
                self.complete(number)
                number = self.begin(f"broadcast from replica {root}, part {start // wide}")
                if source is not None:
                    _put(self.staging.wide(number), source, start)
                self._meet_once(number, deadline_s, lambda: is_sender or root not in self._lost_replicas())
            if source is None:
                _get(self.staging.wide(number), result, start)
        self.complete(number)
        return result.copy() if source is not None else result

    def _lost_replicas(self) -> frozenset[int]:
        alive = self.meeting.membership.workers
        return frozenset(r for share in self._dealt.shares if share.worker not in alive for r in share.replicas)


def _fold_below(node: Node, parts: dict[Node, Array]) -> Array:
    """The sum of a whole subtree, added into the leaf that stands first."""
    if node.is_leaf:
        return parts[node]
    left, right = (_fold_below(child, parts) for child in node.children)
    return np.add(left, right, out=left)


def _deliver(flat: Array, like: Array, out: Any, divisor: float | None) -> Array:
    """The result as an array of its own, in the caller's type and shape, or in the caller's memory."""
    target = np.empty(like.shape, like.dtype) if out is None else as_array(out)
    if target.shape != like.shape:
        raise MismatchError(f"out has the shape {target.shape}, the values have {like.shape}.")
    if divisor == 0:
        raise MismatchError(
            "The mean of nothing: all weights are zero.", do="leave out the call when no replica has rows."
        )
    if divisor is None:
        np.copyto(target, flat.reshape(like.shape), casting="unsafe")
    else:
        np.divide(flat.reshape(like.shape), flat.dtype.type(divisor), out=target, casting="unsafe")
    return target


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _header(array: Array) -> bytes:
    name = array.dtype.name if array.dtype.name == "bfloat16" else array.dtype.str
    if array.dtype.hasobject:
        raise MismatchError(f"An array of {array.dtype} cannot be sent.", do="send numbers, or encode it as bytes.")
    return json.dumps({"dtype": name, "shape": array.shape}).encode()


def _put(place: Array, array: Array, start: int) -> None:
    data = array.reshape(-1).view(np.uint8)[start : start + place.size]
    place[: data.size] = data


def _get(place: Array, array: Array, start: int) -> None:
    data = array.reshape(-1).view(np.uint8)[start : start + place.size]
    data[:] = place[: data.size]
