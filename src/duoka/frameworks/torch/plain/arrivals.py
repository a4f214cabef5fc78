"""Gradients that a backward brings, seen by PyTorch's own hooks, and the end of that backward.

While a backward runs, what `p.grad` held before is kept apart: so what arrives is this worker's own. A backward that
raises leaves `p.grad` as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch

# What DDP, FSDP and activation checkpointing use, too. Taken here, so that a PyTorch without them fails at the import.
_queue = torch.autograd.Variable._execution_engine.queue_callback
_number_of_backward = torch._C._current_graph_task_id


class _Backward:
    """A backward under way. Only the engine holds it, so it is gone with the backward, also with one that raises."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def __call__(self) -> None:
        self._finish()


class Arrivals:
    """Follows parameters. At the end of each backward `finish` is called with what it has brought, by id."""

    def __init__(self, begin: Callable[[], object], finish: Callable[[dict[int, torch.Tensor]], None]) -> None:
        self._begin, self._on_finish = begin, finish
        self.is_taken_only = False  # the last backward was one of torch.autograd.grad
        self._watched: Sequence[Any] = ()
        self._handles: list[Any] = []
        self._bases: dict[int, torch.Tensor | None] = {}  # what p.grad was before this backward
        self._arrived: list[int] = []
        self._tasks: dict[int, ref[_Backward]] = {}  # backwards at whose end a callback runs

    def watch(self, parameters: Sequence[Any]) -> None:
        """Follow these, frozen ones too: a GAN unfreezes its parts in the middle of a batch."""
        found = [p for p in parameters if p.is_leaf and _may_be_trained(p)]
        if len(found) == len(self._watched) and all(map(operator.is_, found, self._watched)):
            return
        self.end()
        self._watched = found
        for index, parameter in enumerate(found):
            is_frozen = not parameter.requires_grad
            if is_frozen:
                parameter.requires_grad_(True)  # PyTorch takes hooks only so, and keeps them
            self._handles.append(parameter.register_hook(partial(self._begin_arrival, index)))
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._arrive, index)))
            if is_frozen:
                parameter.requires_grad_(False)

    def end(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._watched = [], ()

    def _begin_arrival(self, index: int, gradient: torch.Tensor) -> None:
        task = _number_of_backward()
        if task not in self._tasks:
            self._begin()  # an error where a backward has no place
            backward = _Backward(self._finish)
            self._tasks[task] = ref(backward, partial(self._drop, task))
            _queue(backward)
        if index not in self._bases:
            parameter = self._watched[index]
            self._bases[index], parameter.grad = parameter.grad, None

    def _arrive(self, index: int, parameter: torch.Tensor) -> None:
        self._arrived.append(index)

    def _finish(self) -> None:
        """A backward has ended."""
        gradients = {id(self._watched[index]): self._watched[index].grad for index in self._arrived}
        self._put_back()
        self.is_taken_only = not gradients
        if gradients:
            self._on_finish(gradients)

    def _drop(self, task: int, _: object) -> None:
        if task in self._tasks:  # it has raised
            self._put_back()

    def _put_back(self) -> None:
        """`p.grad` is as it was before the backward."""
        for index, base in self._bases.items():
            self._watched[index].grad = base
        self._arrived, self._bases = [], {}
        self._tasks.clear()


def _may_be_trained(parameter: Any) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()
