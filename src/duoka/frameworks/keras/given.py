"""What a script gives to its optimizers: their classes, and their values before they have trained.

Of a saved run, variables are put back, the learning rate among them. Everything else of an optimizer is the script's:
it is part of the functions that train. What is given otherwise is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

_KEPT = "learning_rate"  # a variable, unless it is a schedule
_NAMES = ("name", "module", "registered_name")  # no values; names are counted on


def list_optimizers(model: Any) -> dict[str, Any]:
    """The one that it is compiled with, and those that are attributes of it, as those of a GAN are."""
    found = {} if model.optimizer is None else {"optimizer": model.optimizer}
    more = ((name, value) for name, value in vars(model).items() if isinstance(value, keras.optimizers.Optimizer))
    return found | {name: value for name, value in more if value is not model.optimizer}


def describe(optimizer: Any) -> dict[str, str]:
    """Its values by name, as text."""
    try:
        return dict(_list_values(optimizer.get_config()))
    except Exception:  # one of the user's own, which cannot tell
        return {}


def _list_values(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _list_values(value, f"{prefix}{name} ".replace("config ", ""))
        elif name not in _NAMES and isinstance(value, (bool, int, float, str, type(None), list, tuple)):
            yield prefix + name, f"{value:.7g}" if isinstance(value, float) else str(value)


def list_changes(here: dict[str, str], saved: dict[str, str]) -> list[str]:
    """Whose values count is said with each.

    >>> list_changes({"learning_rate": "0.1", "beta_1": "0.5"}, {"learning_rate": "1", "beta_1": "0.9"})
    ['learning_rate is 0.1 here, and was 1, which counts', 'beta_1 is 0.5 here, which counts, and was 0.9']
    """
    changed = [(name, here.get(name), other) for name, other in saved.items() if here.get(name) != other]
    return [
        f"{name} is {mine} here, and was {other}, which counts"
        if name.endswith(_KEPT)
        else f"{name} is {mine} here, which counts, and was {other}"
        for name, mine, other in changed
    ]
