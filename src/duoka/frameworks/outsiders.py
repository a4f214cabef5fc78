"""Trainings that were forgotten: they run beside those of a strategy, whole on every worker, and one line says so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_FRAMEWORKS = ("keras", "torch")  # a loop of the user's own, in any other, may be meant for one worker


def watch_outsiders(
    after_import: Callable[[str, Callable[[ModuleType], None]], Any], *, is_telling: bool, num_workers: int
) -> None:
    """From the moment a framework is imported: a script that forgets its strategy never asks for an adapter."""

    def tell(text: str) -> None:
        if is_telling:
            print(f"duoka: {text}", file=sys.stderr)

    def watch(module: ModuleType) -> None:
        importlib.import_module(f"duoka.frameworks.{module.__name__}.outsiders").watch_outsiders(tell)

    if num_workers > 1:
        for name in _FRAMEWORKS:
            after_import(name, watch)
