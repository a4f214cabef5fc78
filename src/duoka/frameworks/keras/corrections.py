"""The factors of loss terms, where they are asked for in the middle of a step, when denominators are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duoka.frameworks.keras.terms import COUNTED, Terms


class Corrections:
    """Stands for the array that `Terms.watching` takes; its last element is n / n_r, rows of batch and share."""

    def __init__(self, terms: Terms, factor: Any, ask: Callable[[Any], Any]) -> None:
        self._terms, self._factor, self._ask = terms, factor, ask

    def __getitem__(self, number: int) -> Any:
        if number >= 0 and self._terms.kinds[number] == COUNTED:
            return self._ask(self._terms.denominators[number])
        return self._factor
