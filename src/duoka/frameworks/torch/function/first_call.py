"""The check of a function's first call: does it give the numbers of one device, and does it change nothing else?

It runs on the worker of replica 0, on at most eight samples: for the loss in eval mode, for what prepared modules keep
in the mode they are in. What it finds is an error of that replica, and so is raised on all workers before anything is
added to `p.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from duoka.errors import MismatchError
from duoka.frameworks.torch.function.loss_probe import SEED, LossProbe, RaisedInEvalMode
from duoka.frameworks.torch.function.module_state import find_carried
from duoka.frameworks.torch.function.side_effects import Watch
from duoka.frameworks.torch.function.trained import Trained
from duoka.frameworks.torch.function.update_guard import UpdateGuard
from duoka.frameworks.torch.randomness import seeded

Tell = Callable[..., None]


def check_models(
    models: Sequence[nn.Module],
    parameters: Sequence[nn.Parameter],
    names: Sequence[str],
    tell: Tell,
    *,
    is_synced: bool,
) -> None:
    """What can be seen without a call; the same on all workers."""
    for name, parameter in zip(names, parameters, strict=True):
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise MismatchError(
                f"{name} has a post-accumulate-grad hook, which would see the gradient of one replica.",
                do="do what it does after the backward, on p.grad.",
            )
        if parameter._backward_hooks:
            tell(f"{name} has a hook on its gradient: it runs once per replica, on that replica's gradient", "hooks")
    normalised = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        for model in models
        for module in model.modules()
    )
    if normalised and not is_synced:
        tell(
            "BatchNorm normalises each replica's samples by themselves: the numbers are close to those of one device,"
            " not equal; sync_batchnorm=True makes them equal, with one replica per worker",
            "batchnorm",
        )


def check_function(
    function: Callable[..., Any],
    title: str,
    cut: Callable[[int, int], Sequence[Any]],
    sizes: tuple[int, int],
    trained: Trained,
    tell: Tell,
) -> BaseException | None:
    """Raise what would make a training wrong.

    `cut(start, stop)` returns the arguments for these samples, and lets buffers be as before the call.

    Returns:
        What the function raised in eval mode, in which it cannot be checked.
    """
    models, verdict, failure = trained.models, None, None
    watch = Watch(function, trained.known)
    with UpdateGuard(trained, title) as guard:

        def after_run() -> None:
            guard.look()
            watch.look_again()

        def run() -> None:
            data = cut(0, sum(sizes))
            with torch.enable_grad(), seeded(SEED):
                function(*data)
            after_run()

        # First: a state of other samples, of another number, would make the next run raise.
        carried = _find_carried(run, guard, models)
        probe = LossProbe(function, title, cut, sizes, after_run)
        try:
            verdict = None if carried else probe.find(models, tell)
        except RaisedInEvalMode as raised:
            failure = raised.__cause__
    _report_side_effects(watch, carried, tell, title)
    if verdict is not None:
        raise verdict
    probe.tell_of_metrics(tell)
    return failure


def check_again(
    function: Callable[..., Any],
    title: str,
    cut: Callable[[int, int], Sequence[Any]],
    sizes: tuple[int, int],
    trained: Trained,
    first_loss: float,
    tell: Tell,
) -> None:
    """Raise if the loss is not a mean over samples. Losses that are not may look like one in the first call."""
    watch = Watch(function, trained.known)
    try:
        verdict = LossProbe(function, title, cut, sizes, first_loss=first_loss).find(trained.models, tell)
    except RaisedInEvalMode:
        return
    finally:
        watch.find_grown()  # lists are as long as they were: the first call has warned of them
    if verdict is not None:
        raise verdict


def _find_carried(run: Callable[[], None], guard: UpdateGuard, models: Sequence[nn.Module]) -> list[str]:
    with suppress(Exception):  # the function is about to run for a replica, and raises that again
        return find_carried(run, models)
    guard.look()
    return []


def _report_side_effects(watch: Watch, carried: Sequence[str], tell: Tell, title: str) -> None:
    changed, grown = watch.find_changes(), watch.find_grown()
    if carried:
        raise MismatchError(
            f"{title} changes {list_names(carried)}, in a prepared module.",
            why="it runs once for each replica, and Duoka exchanges parameters and buffers only: the next call would"
            " find what the last replica of its worker has left.",
            do="register it as a buffer, of which replica 0's counts; or change it after strategy.backward. If it is"
            " harmless, pass check=False.",
        )
    if changed:
        raise MismatchError(
            f"{title} changes {list_names(changed)}, outside of itself.",
            why="it runs once for each replica, and again on another worker after a loss: such a change would happen"
            " several times, or not at all.",
            do="return it as a metric, (loss, {'name': (sum, count)}) or strategy.rows(tensor), and change it after"
            " strategy.backward; prepare a module that has buffers; draw from the global generators. If it is"
            " harmless, pass check=False.",
        )
    if grown:
        tell(
            f"{title} lets {list_names(grown)} grow: it runs once per replica, so each batch adds several items;"
            " return what it collects as a metric"
        )


def list_names(names: Sequence[str]) -> str:
    """Return the first names, for a message."""
    more = f" and {len(names) - 3} more" if names[3:] else ""
    return f"{', '.join(names[:3])}{more}"
