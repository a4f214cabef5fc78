"""Flat memory for gradients: a slot per replica to write into, and the sums over all replicas to take out.

Small parameters come first in each flat buffer: they are copied by one call of PyTorch for all of them and weighted by
another. A large one is weighted on its way, so that it passes through memory once.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from duoka.collectives.collective import Buffer, Collective, Exchange
from duoka.collectives.kept import Kept
from duoka.frameworks.torch.layout import Layout, numpy_dtype
from duoka.frameworks.torch.sparse import as_sparse, write_sparse

# For map: loops over parameters are in every step, and run in C.
_GRAD, _DTYPE, _IS_SPARSE = map(operator.attrgetter, ("grad", "dtype", "is_sparse"))
# Nothing is kept where PyTorch does not have it. It is in use there for graphs of CUDA.
_count_uses = getattr(torch._C, "_storage_Use_Count", None)
_USES_OF_ONE = 2  # the tensor's, and that of the storage in Python
_LARGE = 1 << 14  # elements: from here on, a second pass over memory costs more than a call


class GradientBuffers:
    """The memory of one set of parameters, for all calls."""

    def __init__(
        self, collective: Collective, parameters: Sequence[torch.nn.Parameter], sparse: set[int], name: str
    ) -> None:
        self._collective = collective
        self.parameters = parameters
        self._is_small = [p.numel() < _LARGE and id(p) not in sparse for p in parameters]
        order = sorted(range(len(parameters)), key=lambda index: not self._is_small[index])
        self._num_small = sum(self._is_small)
        self._strided = {
            place: parameters[index].stride()
            for place, index in enumerate(order)
            if not parameters[index].is_contiguous() and _is_dense(parameters[index])
        }
        self._tables = [index for index in order if id(parameters[index]) in sparse]
        # For each table with sparse gradients, which of its rows were touched.
        touched = [torch.empty(len(parameters[index]), device="meta") for index in self._tables]
        self._layout = Layout.of([*(parameters[index] for index in order), *touched])
        self._order = order
        self._ordered = [parameters[index] for index in order]
        self._dtypes = [self._layout.dtypes[group] for group, _, _ in self._layout.places[: len(order)]]
        self._has_tables = bool(self._tables)
        self._touched_at = {index: len(order) + number for number, index in enumerate(self._tables)}
        self._small_sizes = self._count_small()
        self._templates = self._group_templates()
        self.buffers: list[Buffer] = [
            collective.buffer(size, numpy_dtype(dtype), name)
            for size, dtype in zip(self._layout.sizes, self._layout.dtypes, strict=True)
        ]
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._slots: dict[int, _Views] = {}
        large = range(self._num_small, len(order))
        self._large_starts = [self._layout.places[place][1] for place in large]
        is_plain = self._layout.dtypes in ((torch.float32,), (torch.float64,)) and not self._has_tables
        self._can_keep = is_plain and self._device.type == "cpu" and {*large}.isdisjoint(self._strided) and bool(large)

    def _count_small(self) -> list[int]:
        """How many elements at the start of each flat buffer belong to small parameters."""
        sizes = [0] * len(self._layout.sizes)
        for place, index in enumerate(self._order):
            group, start, shape = self._layout.places[place]
            if self._is_small[index]:
                sizes[group] = start + shape.numel()
        return sizes

    def _group_templates(self) -> list[list[torch.Tensor]]:
        """Tensors with the shapes of each flat buffer, in its order."""
        groups: list[list[torch.Tensor]] = [[] for _ in self._layout.sizes]
        for group, _, shape in self._layout.places:
            groups[group].append(torch.empty(shape, device="meta"))
        return groups

    def _views(self, exchange: Exchange, replica: int) -> _Views:
        """A replica's flat slots, and a view for each parameter and mask, in the order of the layout."""
        if exchange.is_shadow(replica):
            return self._make_views(exchange, replica)
        if replica not in self._slots:
            self._slots[replica] = self._make_views(exchange, replica)
        return self._slots[replica]

    def _make_views(self, exchange: Exchange, replica: int) -> _Views:
        flats = [torch.as_tensor(exchange.slot(buffer, replica)) for buffer in self.buffers]
        views = self._with_strides(flats, self._layout.views(flats))
        return flats, views, views[: self._num_small]

    def _with_strides(self, flats: Sequence[torch.Tensor], views: list[torch.Tensor]) -> list[torch.Tensor]:
        """Let a gradient have its parameter's strides, as autograd does: fused optimizers rely on it."""
        for place, strides in self._strided.items():
            group, start, shape = self._layout.places[place]
            views[place] = flats[group].as_strided(shape, strides, flats[group].storage_offset() + start)
        return views

    def clear(self, exchange: Exchange, replica: int) -> None:
        """Write zeros: this replica has no gradient."""
        for flat in self._views(exchange, replica)[0]:
            flat.zero_()

    def write(
        self,
        exchange: Exchange,
        replica: int,
        gradients: Sequence[torch.Tensor | None],
        weight: float,
        *,
        can_change: bool = False,
    ) -> bool:
        """Write a replica's gradients, weighted. Parameters without a gradient count as zero.

        `can_change`: these tensors are nobody else's, and may become those that `take` returns.

        Returns:
            Whether there were such parameters.
        """
        flats, views, small_views = self._views(exchange, replica)
        ordered = list(map(gradients.__getitem__, self._order))
        if not self._has_tables and not any(map(operator.is_, ordered, itertools.repeat(None))):
            sources = ordered[: self._num_small]
            if not any(map(_IS_SPARSE, sources)):
                self._copy_small(flats, small_views, sources, weight)
                large = ordered[self._num_small :]
                if not (can_change and self._can_keep and self._keep(exchange, replica, flats[0], large, weight)):
                    for place, gradient in enumerate(large, self._num_small):
                        _write_large(gradient, weight, views[place], None)
                return False
        return self._write_some(flats, views, gradients, weight)

    def _keep(
        self, exchange: Exchange, replica: int, flat: torch.Tensor, gradients: Sequence[Any], weight: float
    ) -> bool:
        """Write only what other workers add up, and let the rest become its sum in the gradients themselves."""
        own = exchange.own_slice(self.buffers[0], replica)
        if own is None or not all(map(_is_exclusive, gradients, itertools.repeat(flat.dtype))):
            return False
        arrays = [gradient.numpy().reshape(-1) for gradient in gradients]
        kept = Kept(replica, own, list(zip(self._large_starts, arrays, strict=True)), weight, gradients)
        for begin, part in kept.outside():
            torch.mul(torch.from_numpy(part), weight, out=flat[begin : begin + part.size])
        exchange.keep(self.buffers[0], kept)
        return True

    def _copy_small(
        self, flats: list[torch.Tensor], views: list[torch.Tensor], sources: Sequence[Any], weight: float
    ) -> None:
        if not views:
            return
        torch._foreach_copy_(views, sources)
        for flat, size in zip(flats, self._small_sizes, strict=True):
            if size and weight != 1.0:
                flat[:size].mul_(weight)

    def _write_some(
        self,
        flats: list[torch.Tensor],
        views: list[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        weight: float,
    ) -> bool:
        """The same where some parameters have no gradient, or a sparse one."""
        small: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        zeros: list[torch.Tensor] = []
        for place, index in enumerate(self._order):
            gradient = gradients[index]
            if place < self._num_small:
                if gradient is None:
                    zeros.append(views[place])
                else:
                    small.append(views[place])
                    sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
                continue
            touched = self._touched_at.get(index)
            if gradient is None:
                zeros += [views[place]] if touched is None else [views[place], views[touched]]
            else:
                _write_large(gradient, weight, views[place], None if touched is None else views[touched])
        if zeros:
            torch._foreach_zero_(zeros)
        self._copy_small(flats, small, sources, weight)
        return bool(zeros)

    def take(self, exchange: Exchange, divisor: float | None) -> list[torch.Tensor]:
        """Copy the sums to memory of this worker's own: new at every call, as the script may keep the last one."""
        if self._can_keep and (kept := exchange.find_kept(self.buffers[0])) is not None:
            return self._take_kept(exchange.result(self.buffers[0]), kept, divisor)
        parts: list[Sequence[torch.Tensor]] = []
        flats: list[torch.Tensor] = []
        for buffer, templates, size, dtype in zip(
            self.buffers, self._templates, self._layout.sizes, self._layout.dtypes, strict=True
        ):
            flat = torch.empty(size, dtype=dtype, device=self._device)
            _copy(exchange.result(buffer), flat, divisor)
            flats.append(flat)
            parts.append(torch._utils._unflatten_dense_tensors(flat, templates))
        if len(parts) == 1:
            return self._with_strides(flats, list(parts[0]))
        remaining = [iter(views) for views in parts]
        return self._with_strides(flats, [next(remaining[group]) for group, _, _ in self._layout.places])

    def _take_kept(self, result: Any, kept: Kept, divisor: float | None) -> list[torch.Tensor]:
        small = torch.empty(self._small_sizes[0], dtype=self._layout.dtypes[0])
        _copy(result[: small.numel()], small, divisor)
        for begin, part in kept.outside():
            _copy(result[begin : begin + part.size], torch.from_numpy(part), divisor)
        for _, part in kept.inside() if divisor is not None else ():
            np.divide(part, part.dtype.type(divisor), out=part)
        views = torch._utils._unflatten_dense_tensors(small, self._templates[0][: self._num_small])
        return [*self._with_strides([small], list(views)), *kept.owners]

    def show(self, sums: Sequence[torch.Tensor], used: np.ndarray | None) -> None:
        """Add the sums to `p.grad`, as autograd would. `used`: of which parameters; None: of all."""
        is_plain = used is None and not self._has_tables and list(map(_DTYPE, self._ordered)) == self._dtypes
        if is_plain and not any(map(operator.is_not, map(_GRAD, self._ordered), itertools.repeat(None))):
            set_gradients(self._ordered, sums)
            return
        for place, index in enumerate(self._order):
            if used is not None and not used[index]:
                continue
            parameter, total = self.parameters[index], sums[place]
            if total.dtype != parameter.dtype:
                total = total.to(parameter.dtype)
            if index in self._touched_at:
                total = as_sparse(total, sums[self._touched_at[index]])
            if parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad = parameter.grad.add_(total)


_Views = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


def set_gradients(parameters: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Set `p.grad` of these parameters."""
    deque(map(setattr, parameters, itertools.repeat("grad"), gradients), maxlen=0)


def _is_exclusive(gradient: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether nothing else shares its memory: autograd hands one tensor, seen in two shapes, to two parameters."""
    if _count_uses is None or gradient.layout != torch.strided or gradient.dtype != dtype:
        return False
    storage = gradient.untyped_storage()
    is_whole = gradient.is_contiguous() and storage.nbytes() == gradient.nbytes
    return is_whole and _count_uses(storage._cdata) == _USES_OF_ONE


def _is_dense(parameter: torch.Tensor) -> bool:
    """Whether it fills its memory without gaps, in any order of dimensions: channels_last does."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _write_large(gradient: torch.Tensor, weight: float, slot: torch.Tensor, touched: torch.Tensor | None) -> None:
    if gradient.layout == torch.sparse_coo:
        write_sparse(gradient, weight, slot, touched)
        return
    if gradient.dtype == slot.dtype:
        torch.mul(gradient, weight, out=slot)
    else:
        slot.copy_(gradient).mul_(weight)
    if touched is not None:
        touched.fill_(1)  # a dense gradient of a table that is also used elsewhere


def _copy(result: Any, private: torch.Tensor, divisor: float | None) -> None:
    if isinstance(result, torch.Tensor):
        private.copy_(result) if divisor is None else torch.div(result, divisor, out=private)
    elif divisor is None:
        np.copyto(private.numpy(), result)
    else:
        np.divide(result, result.dtype.type(divisor), out=private.numpy())
