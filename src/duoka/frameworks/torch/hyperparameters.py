"""Hyperparameters of optimizers, schedulers and scalers, as the script has set them when it prepares them.

A restored state brings its own values, as everywhere in PyTorch. Those that the script sets otherwise are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

Hyperparameters = dict[str, Any]
# What changes while a run trains, or follows from the rest.
_CHANGING = {"params", "initial_lr", "base_lrs", "last_epoch", "best", "num_bad_epochs", "cooldown_counter"}
_PLAIN = (bool, int, float, complex, str, type(None))


def describe(thing: Any) -> Hyperparameters:
    """Its class, and the plain values of its state, by name."""
    state = thing.state_dict()
    is_off = isinstance(thing, torch.amp.GradScaler) and not state
    kind = type(thing).__name__ + (" (not enabled)" if is_off else "")
    return {"class": kind, "values": dict(_list_values(state))}


def _list_values(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    groups = list(state.get("param_groups", ()))
    for name, value in state.items():
        if name == "_schedulers":  # of one that is made of others
            for number, inner in enumerate(value, 1):
                yield from ((f"{number}. {inner_name}", text) for inner_name, text in _list_values(inner))
        elif name not in _CHANGING and not name.startswith("_") and (text := _as_text(value)) is not None:
            yield name, text
    for number, group in enumerate(groups, 1):
        prefix = f"group {number} " if len(groups) > 1 else ""
        for name, value in group.items():
            if name not in _CHANGING and (text := _as_text(value)) is not None:
                yield prefix + name, text


def _as_text(value: Any) -> str | None:
    """None for what is no value that a script would write down: a function, a dictionary of tensors."""
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else None
    if isinstance(value, (list, tuple)) and all(isinstance(part, _PLAIN) for part in value):
        return repr(value)
    if isinstance(value, dict) and value and all(isinstance(part, _PLAIN) for part in (*value, *value.values())):
        return repr(dict(value))
    return repr(value) if isinstance(value, _PLAIN) else None


def list_changes(title: str, here: Sequence[Hyperparameters], saved: Sequence[Hyperparameters]) -> list[str]:
    """The values that differ, of things of the same classes.

    >>> here, saved = {"class": "SGD", "values": {"lr": "0.1"}}, {"class": "SGD", "values": {"lr": "1"}}
    >>> list_changes("optimizer", [here], [saved])
    ['lr of optimizer 1 (SGD) is 0.1 here, and was 1']
    """
    return [
        f"{name} of {title} {number} ({mine['class']}) is {mine['values'].get(name)} here, and was {other}"
        for number, (mine, theirs) in enumerate(zip(here, saved, strict=True), 1)
        for name, other in theirs["values"].items()
        if mine["values"].get(name) != other
    ]
