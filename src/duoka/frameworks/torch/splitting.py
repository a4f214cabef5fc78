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
from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.torch.function.trained import Trained
from duoka.frameworks.torch.nested import map_tensors
from duoka.frameworks.torch.outsiders import end_watch
from duoka.frameworks.torch.plain.exchange import PlainExchange
from duoka.frameworks.torch.plain.share import Share
from duoka.frameworks.torch.randomness import seeded
from duoka.frameworks.torch.start import agree_on_start, check_devices
from duoka.frameworks.torch.tensors import Tensors

_STAND_IN_ROWS = 2  # of others: BatchNorm needs two


class Splitting:
    def __init__(self, module: nn.Module, collective: Collective, seed: int, device: torch.device, axis: int) -> None:
        check_devices(module, device)
        end_watch()
        module.to(device)
        if collective.joining is not None:
            collective.joining.refuse("a split module cannot take in a worker yet")
        agree_on_start(module, collective)
        self._module, self._collective, self._seed = module, collective, seed
        self._device, self._axis = device, axis
        self._tensors = Tensors(device)
        self._kinds: list[Any] = []
        self._trained = Trained(collective, [module], [])
        self._share: Share | None = None
        self._exchange = PlainExchange(collective, self._trained, self._find_share, list, name="split")
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = (self._to_device(given) for given in (args, kwargs))
        num_rows = self._count_rows((args, kwargs))
        replica, num_workers = self._collective.replicas[0], self._collective.num_replicas
        self._exchange.check_complete()
        own = share(num_rows, num_workers, replica)
        rows = own if own else range(min(_STAND_IN_ROWS, num_rows))
        if torch.is_grad_enabled():
            # Every worker has the whole loss. The share of its rows is that of running statistics only.
            part = len(own) / max(num_rows, 1)
            self._share = Share(max(len(own), 1), f"split batch {self._exchange.number}", 1 / num_workers, part)
            self._follow()
        own_args, own_kwargs = (self._take(given, rows.start, rows.stop) for given in (args, kwargs))
        self._calls += 1
        with seeded(derive("split", self._seed, self._calls, replica)):
            out = self._module(*own_args, **own_kwargs)
        return map_tensors(out, lambda tensor: self._gather(tensor, len(own)))

    def _find_share(self) -> Share:
        assert self._share is not None
        return self._share

    def _follow(self) -> None:
        """Watch the parameters of now. `.to` and `.cuda` change types and devices in place: that is a new layout."""
        kinds = [(id(each), each.dtype, each.device) for each in self._module.parameters()]
        if kinds != self._kinds:
            self._kinds = kinds
            self._exchange.end()
            self._device = next((each.device for each in self._module.parameters()), self._device)
            self._trained.forget()
        self._exchange.watch()
        if self._trained.statistics.has_any:
            self._trained.statistics.begin_batch()
            self._trained.statistics.watch_still()

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

    def _take(self, value: Any, first: int, last: int) -> Any:
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
