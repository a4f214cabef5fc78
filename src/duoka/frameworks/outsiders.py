"""Trainings that were forgotten: they run beside those of a strategy, whole on every worker, and one line says so."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from duoka.collectives.collective import Collective
from duoka.frameworks.telling import Telling

_FRAMEWORKS = ("keras",)  # a loop of the user's own, in any other, may be meant for one worker


def watch_outsiders(collective: Collective, after_import: Callable[[str, Callable[[ModuleType], None]], Any]) -> None:
    """From the moment a framework is imported: a script that forgets its strategy never asks for an adapter."""
    tell = Telling(collective).tell_once

    def watch(module: ModuleType) -> None:
        importlib.import_module(f"duoka.frameworks.{module.__name__}.outsiders").watch_outsiders(tell)

    if len(collective.workers) > 1:
        for name in _FRAMEWORKS:
            after_import(name, watch)
