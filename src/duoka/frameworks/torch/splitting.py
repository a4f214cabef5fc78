"""A module whose batches are split between the workers and put together again: whole batch in, whole output out.

Every worker runs the same script on the same whole batch. A forward computes this worker's rows and gathers the
outputs of all, so that every worker has the whole output and takes the same loss of it. A backward brings each worker
the gradient of its own rows, and the sums over workers end up in `p.grad`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from duoka.collectives.collective import Collective
from duoka.data.seeds import derive
from duoka.errors import MismatchError
from duoka.frameworks.torch.backward import listen_to_backward
from duoka.frameworks.torch.contributions import Contributions
from duoka.frameworks.torch.gradients import Gradients
from duoka.frameworks.torch.loop import Body, Loop
from duoka.frameworks.torch.nested import map_tensors
from duoka.frameworks.torch.outsiders import end_watch
from duoka.frameworks.torch.randomness import seeded
from duoka.frameworks.torch.source import rows_of
from duoka.frameworks.torch.sparse import sparse_parameters
from duoka.frameworks.torch.start import agree_on_start, check_devices
from duoka.frameworks.torch.statistics import Statistics
from duoka.frameworks.torch.tensors import Tensors


class Splitting:
    def __init__(self, module: nn.Module, collective: Collective, seed: int, device: torch.device, axis: int) -> None:
        check_devices(module, device)
        end_watch()
        module.to(device)
        if collective.joining is not None:
            collective.joining.refuse("a split module cannot take in a worker yet")
        agree_on_start(module, collective)
        self._module = module
        self._collective = collective
        self._device = device
        self._axis = axis
        self._tensors = Tensors(device)
        self._loop = Loop(seed, collective.num_replicas)
        self._loop.is_managed = self._loop.runs_whole_shares = True
        self._gradients = Gradients(collective, self._loop, lambda text, key: None, Contributions(lambda text: None))
        self._signature: tuple[Any, ...] = ()
        self._calls = 0
        listen_to_backward(self._gradients)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = (self._to_device(given) for given in (args, kwargs))
        num_rows = self._count_rows((args, kwargs))
        replicas = self._collective.replicas
        rows, num_own = rows_of(num_rows, self._collective.num_replicas, replicas)
        first, last = (rows[0], rows[-1] + 1) if num_rows else (0, 0)
        if torch.is_grad_enabled():
            weight = 1 / len(self._collective.workers)  # every worker has the whole loss
            self._begin(Body(replicas, num_own, max(num_rows, 1), fixed_weight=weight))
        own_args, own_kwargs = (self._take(given, first, last, num_rows) for given in (args, kwargs))
        self._calls += 1
        with seeded(derive("split", self._loop.seed, self._calls, replicas[0])):
            out = self._module(*own_args, **own_kwargs)
        return map_tensors(out, lambda tensor: self._gather(tensor, num_own))

    def _begin(self, body: Body) -> None:
        """A forward that follows a backward begins another batch."""
        before = self._loop.body
        if before is not None and not before.backwards:
            self._loop.body = body
            return
        if before is not None:
            self._gradients.end_batch()
            self._collective.end_step()
            self._loop.batch += 1
            self._loop.step += 1
        self._rescan()
        self._gradients.begin_batch()
        self._loop.body = body

    def _rescan(self) -> None:
        named = [(name, p) for name, p in self._module.named_parameters() if p.requires_grad]
        statistics = Statistics([self._module], self._gradients.moving)
        # With types and devices: `.to` changes them in place, and a gradient would not reach its old hook any more.
        kept = tuple((id(parameter), parameter.dtype, parameter.device) for _, parameter in named)
        signature = (kept, statistics.signature)
        if signature != self._signature:
            self._signature = signature
            self._gradients.watch(named, sparse_parameters([self._module]), statistics)
        self._gradients.watch_buffers()

    def _to_device(self, value: Any) -> Any:
        return map_tensors(value, lambda tensor: tensor.to(self._device, non_blocking=True))

    def _count_rows(self, value: Any) -> int:
        sizes: set[int] = set()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() > self._axis:
                sizes.add(tensor.shape[self._axis])
            return tensor

        map_tensors(value, note)
        if len(sizes) != 1:
            found = f"sizes {sorted(sizes)} along dimension {self._axis}" if sizes else "no tensor"
            raise MismatchError(
                f"The inputs of a split module have {found}.",
                why="the rows of a batch are dealt to the workers along that dimension.",
                do="pass tensors with as many rows each; what is not to be split can be an attribute of the module.",
            )
        return sizes.pop()

    def _take(self, value: Any, first: int, last: int, num_rows: int) -> Any:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.narrow(self._axis, first, last - first) if tensor.dim() > self._axis else tensor

        return map_tensors(value, take)

    def _gather(self, tensor: torch.Tensor, num_own: int) -> Any:
        if tensor.dim() == 0:
            tensor = tensor.reshape(1)  # a loss taken inside the module: one for each worker, as DataParallel does
        elif num_own == 0:
            tensor = tensor.narrow(self._axis, 0, 0)  # what a stand-in gave
        return _Gather.apply(tensor, self._axis if tensor.dim() > self._axis else 0, self._collective, self._tensors)


class _Gather(torch.autograd.Function):
    """The workers' parts side by side. All take the same loss of it, so each has its own part's gradient already.

    Gradients are means over workers, so that what reaches parameters past this (a penalty on weights) counts once;
    what comes through here has one worker that knows it, and is multiplied by their number.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, axis: int, collective: Collective, tensors: Tensors) -> torch.Tensor:
        read = tensors.read(own)
        assert read is not None
        kind, bits = read
        nothing = np.take(bits, [], axis)
        parts = collective.all_gather([bits] + [nothing] * (len(collective.replicas) - 1))
        ctx.axis, ctx.size, ctx.num_workers = axis, own.shape[axis], len(collective.workers)
        mine = collective.replicas[0]
        ctx.start = sum(part.shape[axis] for part in parts[:mine])
        return tensors.make(kind, np.concatenate(parts, axis), own)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.narrow(ctx.axis, ctx.start, ctx.size) * ctx.num_workers, None, None, None
