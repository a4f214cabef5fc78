"""Training that was forgotten: an optimizer that steps in a run of several workers with no model prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

_hooks: list[Any] = []


def watch_outsiders(tell: Callable[[str], None]) -> None:
    """Warn at the first step of an optimizer, unless `end_watch` was called before it."""
    is_told = False

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal is_told
        if is_told or not has_gradients(optimizer):
            return
        is_told = True  # the hook stays: PyTorch goes through its hooks at this moment
        tell(
            f"{type(optimizer).__name__} steps on a model that was not prepared: each worker trains a model of its own,"
            " and no gradient is exchanged; call model, optimizer, loader = strategy.prepare(model, optimizer, loader)"
            " before the loop"
        )

    _hooks.append(register_optimizer_step_pre_hook(look))


def has_gradients(optimizer: Any) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def end_watch() -> None:
    """A model belongs to the run: from here on, strategies look after their optimizers."""
    while _hooks:
        _hooks.pop().remove()
