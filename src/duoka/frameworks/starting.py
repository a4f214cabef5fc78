"""Bring up the frameworks that a script has imported, so that what they hold at rest is not counted as the user's."""

from __future__ import annotations

import importlib
import sys

_FRAMEWORKS = ("torch", "tensorflow", "jax")


def start_imported_frameworks() -> None:
    for name in _FRAMEWORKS:
        if name in sys.modules:
            importlib.import_module(f"duoka.frameworks.{name}.starting").start()
