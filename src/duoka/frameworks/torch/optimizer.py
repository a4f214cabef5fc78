"""Optimizers, schedulers and scalers that do something only when the batch is complete.

The methods are replaced on the object itself: its class, its state and what it saves stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from duoka.errors import MismatchError
from duoka.frameworks.torch.gradients import Gradients
from duoka.frameworks.torch.loop import Loop


def hold_back(thing: Any, names: tuple[str, ...], loop: Loop, answer: Any = None) -> None:
    """Make these methods no-ops in bodies that do not complete their batch."""
    for name in names:
        setattr(thing, name, _only_when_complete(getattr(thing, name), loop, answer))


def _only_when_complete(method: Callable[..., Any], loop: Loop, answer: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) if loop.may_step else answer

    return call


def prepare_optimizer(optimizer: Any, loop: Loop, gradients: Gradients | None) -> None:
    step = optimizer.step

    @functools.wraps(step)
    def step_when_complete(*args: Any, **kwargs: Any) -> Any:
        if not loop.may_step:
            return None
        if gradients is not None:
            _refuse_strangers(optimizer, gradients)
        return step(*args, **kwargs)

    optimizer.step = step_when_complete


def _refuse_strangers(optimizer: Any, gradients: Gradients) -> None:
    """A gradient that took part in no exchange would make the replicas drift apart in silence."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is not None and not gradients.knows(parameter):
                raise MismatchError(
                    f"The optimizer has a gradient that was exchanged with nobody:"
                    f" parameter {position} of group {number}, shape {tuple(parameter.shape)}.",
                    why="it belongs to no prepared model, was frozen at the start of this batch, or was set by hand.",
                    do="pass its model to strategy.prepare, and change layers between batches.",
                )
