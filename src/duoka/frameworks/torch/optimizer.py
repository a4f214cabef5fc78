"""Optimizers, schedulers and scalers that do something only when the batch is complete.

They stay the same objects, and what they save stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any
from weakref import WeakMethod

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from duoka.errors import MismatchError
from duoka.frameworks.torch.loop import Loop


def hold_back(thing: Any, names: tuple[str, ...], loop: Loop, title: str) -> None:
    """Make these methods no-ops in bodies that do not complete their batch.

    By a class of its own: a scheduler saves whatever it finds among its attributes, and loads it back.
    """
    kind = type(thing)
    is_scaler = isinstance(thing, torch.amp.GradScaler)
    methods: dict[str, Any] = {
        name: _only_when_complete(getattr(kind, name), loop, f"{title} {name}", is_scaler and name == "step")
        for name in names
    }
    methods |= {"__module__": kind.__module__, "__doc__": kind.__doc__}
    # A copy, or one that was pickled, is a plain one again.
    methods["__reduce_ex__"] = lambda self, protocol: (_make_plain, (kind, dict(self.__dict__)))
    thing.__class__ = type(kind.__name__, (kind,), methods)


def _make_plain(kind: Any, attributes: dict[str, Any]) -> Any:
    thing = kind.__new__(kind)
    thing.__dict__.update(attributes)
    return thing


def watch_steps(check: Callable[[Any, Any, Any], None]) -> None:
    """Call a method before every step of every optimizer, as long as its object lives."""
    reference = WeakMethod(check)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if (alive := reference()) is not None:
            alive(optimizer, args, kwargs)

    register_optimizer_step_pre_hook(hook)


def _only_when_complete(method: Callable[..., Any], loop: Loop, call: str, is_update: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_when_complete(*args: Any, **kwargs: Any) -> Any:
        body = loop.body
        if body is None and loop.is_replaying:
            return None  # it has happened, and its effect was restored
        if body is None or not loop.is_managed:
            return method(*args, **kwargs)
        body.record(call)
        body.has_called_step = body.has_called_step or is_update
        if not loop.may_step:
            if not body.backwards:
                body.held_back.add(call)
            return None
        body.held_back.discard(call)
        body.is_quiet, before = True, body.is_quiet
        try:
            return method(*args, **kwargs)
        finally:
            body.is_quiet = before

    return call_when_complete


def prepare_optimizer(optimizer: Any, loop: Loop, title: str, check: Callable[[Any], None]) -> None:
    """Let `step` wait for the whole batch; `check` sees the optimizer before each real one."""
    step = optimizer.step

    def checked_step(*args: Any, **kwargs: Any) -> Any:
        check(optimizer)
        result = step(*args, **kwargs)
        loop.updated[id(optimizer)] = loop.batch
        return result

    waiting_step = _only_when_complete(checked_step, loop, f"{title} step", is_update=True)

    @functools.wraps(step)
    def prepared_step(_: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if not loop.is_managed:
            loop.updated[id(optimizer)] = loop.batch
            return step(*args, **kwargs) if closure is None else step(closure, *args, **kwargs)
        if loop.is_in_backward:
            raise MismatchError(
                "An optimizer was asked to step within backward.",
                why="the gradient of the whole batch is known when backward has ended.",
                do="call optimizer.step() after backward().",
            )
        with loop.noting_errors():
            loss = _evaluate_once(optimizer, closure)
            result = waiting_step(*args, **kwargs)
        return loss if closure is not None else result

    optimizer.step = MethodType(prepared_step, optimizer)  # bound: schedulers made later look for its __func__


def _evaluate_once(optimizer: Any, closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MismatchError(
            "LBFGS cannot train several replicas.",
            why="it evaluates the loss a varying number of times within one step.",
            do="use another optimizer, or one replica.",
        )
    with torch.enable_grad():
        return closure()


def describe_rates(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> list[str]:
    """Return the learning rates of each optimizer, and the best number that each ReduceLROnPlateau was passed.

    Workers compare them. A number of one worker alone is found as soon as a scheduler gets it, long before the rates
    differ.
    """
    found = []
    for number, optimizer in enumerate(optimizers, start=1):
        rates = [repr(float(group["lr"])) for group in optimizer.param_groups if "lr" in group]
        found.append(f"optimizer {number}: {', '.join(rates) or 'none'}")
    for number, scheduler in enumerate(schedulers, start=1):
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            found.append(f"ReduceLROnPlateau (scheduler {number}): best {scheduler.best!r}")
    return found
