"""What a call exchanges: trainable parameters of prepared models and optimizers, and the models' buffers.

Looked at in every call, because layers are frozen, unfrozen and added between calls. Comparing identities takes a
fraction of the time of listing everything again.
"""

from __future__ import annotations

import itertools
import operator
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from duoka.collectives.collective import Collective
from duoka.frameworks.torch.function.gradient_buffers import GradientBuffers
from duoka.frameworks.torch.sparse import sparse_parameters
from duoka.frameworks.torch.state import TorchState
from duoka.frameworks.torch.statistics import Statistics

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class Trained:
    """The parameters and buffers of now, and the memory to exchange them with."""

    def __init__(
        self,
        collective: Collective,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        *,
        is_synced: bool = False,
    ) -> None:
        self._collective, self._models, self._optimizers = collective, models, optimizers
        self._is_synced = is_synced  # running statistics are those of the whole batch on every replica
        self._dicts: list[dict[str, Any]] = []
        self._buffer_dicts: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self._marks: list[Any] = []
        self._moving: set[Any] = set()  # buffers that some function has changed: they travel
        self._layouts: dict[tuple[int, ...], list[GradientBuffers]] = {}  # by the parameters that are trained
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.statistics = Statistics([])
        self._buffers: list[GradientBuffers] = []

    def forget(self) -> None:
        """List everything again at the next scan, with memory of its own: types or devices have changed."""
        self._values, self._layouts, self.statistics = [], {}, Statistics([])

    def scan(self) -> None:
        """Notice what has changed since the last call."""
        values = self._read_values()
        is_same = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if not is_same or self._marks != self._read_marks():
            self._list()

    @property
    def models(self) -> Sequence[nn.Module]:
        return self._models

    @property
    def known(self) -> set[int]:
        """The ids of what a call may change: prepared modules, optimizers and their parameters."""
        modules = {id(module) for model in self._models for module in model.modules()}
        tensors = {id(each) for model in self._models for each in (*model.parameters(), *model.buffers())}
        held = {id(parameter) for optimizer in self._optimizers for parameter in _parameters_of(optimizer)}
        return modules | tensors | held | {id(optimizer) for optimizer in self._optimizers}

    def first_parameters(self) -> list[nn.Parameter]:
        """The first trainable parameter of each model and of each optimizer."""
        owned = [*(list(model.parameters()) for model in self._models), *map(_parameters_of, self._optimizers)]
        firsts = (next((parameter for parameter in each if parameter.requires_grad), None) for each in owned)
        return list({id(first): first for first in firsts if first is not None}.values())

    def state(self) -> TorchState:
        """For comparing workers."""
        return TorchState(self._models, self._optimizers)

    def plain_state(self) -> TorchState:
        """The same in a plain loop. Running statistics are each worker's own until the next exchange merges them."""
        return TorchState(self._models, self._optimizers, {id(place.held) for place in self.statistics.merged})

    def move(self, positions: Iterable[int]) -> None:
        """Let these buffers travel, which stood still until now."""
        for position in positions:
            place = self.statistics.still[position]
            self._moving.add((id(place.module), place.name))
        self._list()

    def list_moving(self, modules: Iterable[tuple[str, nn.Module]]) -> list[list[str]]:
        """The buffers that travel, by the names of their modules."""
        return [
            [path, name] for path, module in modules for name in module._buffers if (id(module), name) in self._moving
        ]

    def set_moving(self, modules: Mapping[str, nn.Module], moving: Iterable[Sequence[str]]) -> None:
        self._moving |= {(id(modules[path]), name) for path, name in moving}
        self._list()

    def buffers(self, num_groups: int) -> list[GradientBuffers]:
        """Memory for the gradients of each group of loss terms: one, unless terms are weighed by different counts."""
        while len(self._buffers) < num_groups:
            name = f"function gradients, layout {self._layout}, group {len(self._buffers)}"
            sparse = sparse_parameters(self._models)
            self._buffers.append(GradientBuffers(self._collective, self.parameters, sparse, name))
        return self._buffers[:num_groups]

    def _read_values(self) -> list[Any]:
        """All modules and parameters. Compared by identity: in C, as this happens in every call."""
        return list(itertools.chain.from_iterable(map(dict.values, self._dicts)))

    def _read_marks(self) -> list[Any]:
        marks: list[Any] = list(map(_REQUIRES_GRAD, self._all))
        for optimizer in self._optimizers:  # loops, not comprehensions: those are calls, and this is in every step
            for group in optimizer.param_groups:
                marks.append(len(group["params"]))
        # Not which tensors: some layers put another one into the place of a buffer in every forward.
        for buffers in self._buffer_dicts:
            for value in buffers.values():
                marks.append(value is None)
        marks.append(len(self._models))
        return marks

    def _list(self) -> None:
        modules = [module for model in self._models for module in model.modules()]
        self._dicts = [each for module in modules for each in (module._parameters, module._modules)]
        self._buffer_dicts = [module._buffers for module in modules]
        named = {id(p): (name, p) for model in self._models for name, p in model.named_parameters()}
        for number, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                for position, parameter in enumerate(group["params"]):
                    named.setdefault(id(parameter), (f"parameter {position} of optimizer {number}", parameter))
        self._all = [parameter for _, parameter in named.values()]
        self.all_names = [name for name, _ in named.values()]
        trainable = [(name, parameter) for name, parameter in named.values() if parameter.requires_grad]
        self.names, self.parameters = [name for name, _ in trainable], [parameter for _, parameter in trainable]
        statistics = Statistics(self._models, self._moving, is_synced=self._is_synced)
        if statistics.signature != self.statistics.signature:  # else it knows what has changed in this batch
            self.statistics = statistics
            statistics.keep_still()
        # A GAN freezes and unfreezes its parts in turns: the memory of a set of parameters is used again.
        self._buffers = self._layouts.setdefault(tuple(map(id, self.parameters)), [])
        # Memory is known by name. A worker that joins later has not seen the layouts before, and finds this one.
        places = {id(parameter): place for place, parameter in enumerate(self._all)}
        self._layout = _digest([(places[id(p)], p.shape, p.dtype) for p in self.parameters])
        paths = {id(module): path for path, module in enumerate(modules)}
        self.statistic_layout = _digest(self.statistics.describe(paths))
        self._values, self._marks = self._read_values(), self._read_marks()

    @property
    def everything(self) -> Sequence[torch.Tensor]:
        """All parameters, those that are frozen included."""
        return self._all

    _all: Sequence[torch.Tensor] = ()
    all_names: Sequence[str] = ()
    _layout = ""
    statistic_layout = ""


def _digest(layout: Any) -> str:
    return f"{zlib.crc32(repr(layout).encode()):08x}"


def _parameters_of(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
