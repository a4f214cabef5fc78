"""What a script gives to its optimizers: their classes, and their values before they have trained.

Of a saved run, variables are put back, the learning rate among them. Everything else of an optimizer is the script's:
it is part of the functions that train. What is given otherwise is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

Given = dict[str, str]
_RATE = "learning_rate"  # a variable, unless it is a schedule
_NAMES = ("name", "module", "registered_name")  # no values; names are counted on


def list_optimizers(model: Any) -> dict[str, Any]:
    """The one that it is compiled with, and those that are attributes of it, as those of a GAN are."""
    found = {} if model.optimizer is None else {"optimizer": model.optimizer}
    more = ((name, value) for name, value in vars(model).items() if isinstance(value, keras.optimizers.Optimizer))
    return found | {name: value for name, value in more if value is not model.optimizer}


def describe(optimizer: Any) -> Given:
    """Its values by name, as text."""
    try:
        return list_values(optimizer.get_config())
    except Exception:  # one of the user's own, which cannot tell
        return {}


def list_values(config: dict[str, Any]) -> Given:
    return dict(_walk(config))


def _walk(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}{name} ".replace("config ", ""))
        elif name not in _NAMES and isinstance(value, (bool, int, float, str, type(None), list, tuple)):
            yield prefix + name, f"{value:.7g}" if isinstance(value, float) else str(value)


class Changes:
    """What a script gives otherwise than the saved run did, apart by whose value counts.

    >>> changes = Changes()
    >>> changes.add("it", {"learning_rate": "0.1", "beta_1": "0.5"}, {"learning_rate": "1", "beta_1": "0.9"})
    >>> for line in changes.lines():
    ...     print(line)
    the saved run goes on with its own values, not with those of this script: learning_rate of it is 0.1 here, and was 1
    the run goes on with values of this script, not with those of the saved run: beta_1 of it is 0.5 here, and was 0.9
    """

    def __init__(self) -> None:
        self._saved_count: list[str] = []
        self._own_count: list[str] = []

    def add(self, title: str, here: Given, saved: Given, *, has_variables: bool = True) -> None:
        """`has_variables`: not with optimizers that keep their learning rate as a plain number."""
        for name, other in saved.items():
            if here.get(name) != other:
                which = self._saved_count if has_variables and _is_variable(name) else self._own_count
                which.append(f"{name} of {title} is {here.get(name)} here, and was {other}")

    def lines(self) -> list[str]:
        titles = {
            "the saved run goes on with its own values, not with those of this script": self._saved_count,
            "the run goes on with values of this script, not with those of the saved run": self._own_count,
        }
        return [f"{title}: {'; '.join(changes)}" for title, changes in titles.items() if changes]


def _is_variable(name: str) -> bool:
    """Also of an inner optimizer, and not what a schedule is made of.

    >>> [_is_variable(name) for name in ("inner_optimizer learning_rate", "learning_rate initial_learning_rate")]
    [True, False]
    """
    *prefix, last = name.split()
    return last == _RATE and _RATE not in prefix
