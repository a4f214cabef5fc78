"""Steps of optimizers in plain style: counted, and refused where their gradients are not those of the whole batch.

By PyTorch's own hooks: optimizers stay the objects they are.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from duoka.errors import MismatchError
from duoka.frameworks.torch.outsiders import has_gradients

_prepared: WeakSet[torch.optim.Optimizer] = WeakSet()  # of all strategies of a script


class Owner(Protocol):
    """The adapter, as far as steps need it."""

    @property
    def is_plain(self) -> bool: ...

    @property
    def is_function(self) -> bool: ...

    @property
    def has_kept_gradients(self) -> bool: ...

    @property
    def is_taken_only(self) -> bool: ...

    @property
    def num_samples(self) -> int | None: ...

    @property
    def num_replicas(self) -> int: ...

    def count_step(self) -> None: ...

    def knows(self, parameters: set[int]) -> bool: ...

    def tell_once(self, text: str, key: str = "") -> None: ...


class StepWatch:
    """Looks at every step of prepared optimizers, and at the first steps of the others."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._has_stepped = False  # in the batch under way
        if owner.num_replicas > 1:
            _look_at_all(self)

    def begin_batch(self) -> None:
        self._has_stepped = False

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """A prepared optimizer. Its hooks keep the strategy alive as long as it lives."""
        _prepared.add(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        owner = self._owner
        if not owner.is_plain or owner.num_replicas == 1:
            return
        if owner.has_kept_gradients:
            raise MismatchError(
                "optimizer.step() was called while gradients of strategy.no_sync() wait for an exchange.",
                why="p.grad does not have them: each worker has only those of its own samples.",
                do="call the last backward before optimizer.step() outside of strategy.no_sync().",
            )
        if owner.is_taken_only:
            owner.tell_once(
                f"{type(optimizer).__name__} steps after torch.autograd.grad: gradients that a script sets by hand are"
                " those of this worker's samples, and workers train apart. Call backward(), or pass each one through"
                " strategy.mean"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MismatchError(
                "LBFGS cannot train in a plain loop on several workers.",
                why="it decides by the loss of its closure, which is that of this worker's samples.",
                do="let the closure return strategy.backward(loss_of, batch), for batch in strategy.batches(loader).",
            )

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._has_stepped and not self._owner.is_function:
            self._has_stepped = True
            self._owner.count_step()

    def look(self, optimizer: Any) -> None:
        """Any optimizer is about to step."""
        owner = self._owner
        if optimizer in _prepared or not owner.is_plain:
            return
        if owner.knows({id(p) for group in optimizer.param_groups for p in group["params"]}):
            owner.tell_once(
                f"{type(optimizer).__name__} steps on a prepared model and was not prepared: its state is not saved or"
                " restored. Pass it to strategy.prepare"
            )
        elif owner.num_samples is not None and has_gradients(optimizer):
            raise MismatchError(
                f"This {type(optimizer).__name__} steps on parameters that were not prepared, and the loader was.",
                why="each worker would train a model of its own, on its own samples: no gradient is exchanged.",
                do="pass all of them: model, optimizer, loader = strategy.prepare(model, optimizer, loader).",
            )


def _look_at_all(watch: StepWatch) -> None:
    """Look before every step of every optimizer, as long as the strategy lives."""
    reference = ref(watch)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if (alive := reference()) is not None:
            alive.look(optimizer)

    register_optimizer_step_pre_hook(hook)
