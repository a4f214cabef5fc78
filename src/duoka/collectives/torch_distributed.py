"""The collective of workers on cards: what is large stays on the device and travels by torch.distributed.

Everything small goes through the *control* collective, which shares memory on this host: who has arrived, what was
called, notes, deadlines, and what to do after a loss. Only the numbers of `exchange` are carried by NCCL or, on CPU
devices, by Gloo; the two differ by a name and by where the tensors lie, so that testing one tests the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from duoka.collectives.arrays import Array
from duoka.collectives.buffers import SharedBuffer
from duoka.collectives.collective import Buffer, Collective, Exchange, Op
from duoka.collectives.decision import Difference
from duoka.collectives.exchange import SharedExchange
from duoka.collectives.meeting import REDUCED, Meeting
from duoka.collectives.shm import SharedMemory
from duoka.collectives.torch_group import Groups, Watch
from duoka.collectives.torch_sums import LibrarySum, OwnSum, Sum, TreeSum, add
from duoka.errors import MismatchError, WorkerLost
from duoka.topology.placement import Placement
from duoka.topology.tree import Node

_GRACE_S = 5.0  # a library hears that a connection is closed before the supervisor has told why


class DeviceBuffer(Buffer):
    """One tensor for each replica that this worker runs; those of other workers lie on their devices."""

    def __init__(self, count: int, dtype: Any, device: torch.device, number: int) -> None:
        if count < 0:
            raise MismatchError(f"A buffer of {count} numbers.", do="use a count of 0 or more.")
        self.dtype = np.dtype(dtype)
        self.count = count
        self.nbytes = count * self.dtype.itemsize
        # Compared between workers: buffers that were not made in the same order belong to other things.
        self.title = f"{self.dtype}[{count}]#{number}"
        self._like = torch.empty(0, dtype=_tensor_type(self.dtype), device=device)
        self._slots: dict[int, torch.Tensor] = {}
        self._sum: tuple[Placement, bool, Sum] | None = None

    def slot(self, replica: int) -> torch.Tensor:
        if replica not in self._slots:
            self._slots[replica] = self._like.new_zeros(self.count)
        return self._slots[replica]

    def add(self, into: Node, other: Node) -> None:
        """The sum of two subtrees, in the slot of the left one."""
        left = self.slot(into.start)
        add(left, self.slot(other.start), out=left)

    def sum_for(self, placement: Placement, worker: int, is_exact: bool) -> Sum:
        """How these replicas are added up; made once per dealing of replicas."""
        if self._sum is None or self._sum[:2] != (placement, is_exact):
            self._sum = placement, is_exact, self._make_sum(placement, worker, is_exact)
        return self._sum[2]

    def _make_sum(self, placement: Placement, worker: int, is_exact: bool) -> Sum:
        mine = [node for node in placement.partials if placement.owner(node.start) == worker]
        own = {node: self.slot(node.start) for node in mine}
        if len(placement.workers) == 1:
            return OwnSum(placement.num_replicas, placement.partials, list(own.values()))
        if self.count == 0:
            return OwnSum(1, (Node(0, 1),), [self._like])
        if not is_exact and LibrarySum.can_add(self._like.dtype):
            return LibrarySum(list(own.values()))
        return TreeSum(own, placement, worker)

    def forget_sum(self) -> None:
        """A call that was left in its middle may still write into the memory of its sum."""
        self._sum = None

    def result(self, homes: Sequence[int]) -> torch.Tensor:
        assert self._sum is not None
        return self._sum[2].result


class TorchDistributed(Collective):
    """Slots and results of `exchange` are tensors on this worker's device; all other calls are the control's.

    With `exact`, sums follow the tree and have the bits of shared memory. Without, they are the library's own.
    """

    def __init__(self, control: SharedMemory, backend: str, device: torch.device, *, exact: bool) -> None:
        self.worker = control.worker
        self.num_replicas = control.num_replicas
        self.deadline_s = control.deadline_s
        self.exact = exact
        self._control = control
        self._device = device
        self._backend = backend
        self._order = "tree order" if exact else "any order"
        is_alone = len(control.workers) == 1
        self._groups = None if is_alone else Groups(control.meeting, backend, device, f"{backend} in {self._order}")
        self._numbers = itertools.count()

    @property
    def placement(self) -> Placement:
        return self._control.placement

    @property
    def main(self) -> int:
        return self._control.main

    @property
    def own_replicas(self) -> tuple[int, ...]:
        return self._control.own_replicas

    @property
    def meeting(self) -> Meeting:
        return self._control.meeting

    def remove(self, workers: Sequence[int], difference: Difference) -> None:
        self._control.remove(workers, difference)

    def buffer(self, count: int, dtype: Any, name: str = "") -> DeviceBuffer:
        self._control.check_usable()
        return DeviceBuffer(int(count), dtype, self._device, next(self._numbers))

    def scratch(self, count: int, dtype: Any) -> SharedBuffer:
        """In the memory of the host, for programs that compute there: arrays, not tensors."""
        return self._control.scratch(count, dtype)

    @property
    def next_number(self) -> int:
        return self._control.next_number

    def await_main(self, is_done: Callable[[], bool]) -> bool:
        return self._control.await_main(is_done)

    def common(self, nbytes: int) -> Array:
        return self._control.common(nbytes)

    def exchange(self, buffers: Sequence[Buffer], name: str = "", deadline_s: float | None = None) -> Exchange:
        if all(isinstance(buffer, SharedBuffer) for buffer in buffers):
            return self._control.exchange(buffers, name, deadline_s)
        ours = [buffer for buffer in buffers if isinstance(buffer, DeviceBuffer)]
        assert len(ours) == len(buffers), "buffers come from this collective's buffer(), or all from its scratch()"
        if len({id(buffer) for buffer in ours}) < len(ours):
            raise MismatchError("One exchange was given the same buffer twice.", do="make a buffer for each.")
        self._control.check_usable()
        self._control.release()
        titles = ", ".join(buffer.title for buffer in ours)
        call = f"{f'exchange {name}'.strip()} by {self._backend} in {self._order} of {titles}"
        return SharedExchange(self._control, ours, call, can_redo=True, carry=partial(self._carry, ours))

    def _carry(self, buffers: Sequence[DeviceBuffer], number: int, deadline_s: float) -> None:
        """Add up what all workers have deposited. Everybody has arrived, and is about to do the same."""
        sums = [buffer.sum_for(self.placement, self.worker, self.exact) for buffer in buffers]
        meeting = self._control.meeting
        if len(self.placement.workers) == 1:
            for each in sums:
                assert isinstance(each, OwnSum)
                each.send()
            return
        assert self._groups is not None
        watch = Watch(meeting, number, deadline_s)
        try:
            group = self._groups.current(watch)
            self._control.moment("sending")
            sent = [each.send(group) for each in sums]
            self._control.moment("sent")
            gathering = []
            for each, works in zip(sums, sent, strict=True):
                watch.finish(works)
                gathering += each.finish(group)
            self._control.moment("gathering")
            watch.finish(gathering)
        except BaseException as error:
            self._groups.abandon()
            for buffer in buffers:
                buffer.forget_sum()
            if isinstance(error, (RuntimeError, OSError)):  # as the libraries say that a connection is gone
                raise self._explain(error, number, deadline_s) from error
            raise

    def _explain(self, error: Exception, number: int, deadline_s: float) -> WorkerLost:
        """Mostly a worker is lost, and the meeting will say so: it raises Regrouped, and the step is done again."""
        self._control.meeting.wait_at_most(number, REDUCED, min(deadline_s, _GRACE_S))
        return WorkerLost(
            f"Worker {self.worker} lost its connection to the others at step {self._control.meeting.steps},"
            f" while {self._backend} added up the sums of call {number}.",
            why=f"{self._backend} says: {str(error).splitlines()[0][:300]}",
            do="see the logs of all workers for the first error; DUOKA_TRANSPORT=shm does without the library.",
        )

    # Everything else is small.

    def work_on(self, step: int, replicas: Sequence[int], *, is_left: bool = False) -> None:
        self._control.work_on(step, replicas, is_left=is_left)

    def end_step(self) -> None:
        self._control.end_step()

    def all_reduce(
        self,
        values: Sequence[Any],
        op: Op = "sum",
        *,
        weights: Sequence[float] | None = None,
        out: Any = None,
        deadline_s: float | None = None,
    ) -> Array:
        return self._control.all_reduce(_on_host(values), op, weights=weights, out=out, deadline_s=deadline_s)

    def all_gather(self, values: Sequence[Any], *, deadline_s: float | None = None) -> list[Array]:
        return self._control.all_gather(_on_host(values), deadline_s=deadline_s)

    def broadcast(self, value: Any = None, *, root: int = 0, deadline_s: float | None = None) -> Array:
        return self._control.broadcast(_on_host([value])[0], root=root, deadline_s=deadline_s)

    def barrier(self, *, deadline_s: float | None = None) -> None:
        self._control.barrier(deadline_s=deadline_s)


def _on_host(values: Sequence[Any]) -> list[Any]:
    return [value.detach().cpu() if isinstance(value, torch.Tensor) else value for value in values]


def _tensor_type(dtype: np.dtype[Any]) -> torch.dtype:
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise MismatchError(f"A tensor cannot hold {dtype}.", do="use numbers of 8 to 64 bits, float or complex.")
    return found
