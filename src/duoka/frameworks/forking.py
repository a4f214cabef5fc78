"""What must be true of the frameworks in this process before it is forked, and after."""

from __future__ import annotations

import importlib
import sys

_FRAMEWORKS = ("torch", "tensorflow", "jax")


def why_not_fork() -> str | None:
    """The reason why a forked child could not use what this process has started; None if it could."""
    for name in _FRAMEWORKS:
        if name in sys.modules:
            reason: str | None = importlib.import_module(f"duoka.frameworks.{name}.forking").why_not_fork()
            if reason is not None:
                return reason
    return None


def pin_one_thread() -> None:
    """In a forked child: the parent's thread pools did not survive, and waiting for them would hang."""
    for name in _FRAMEWORKS:
        if name in sys.modules:
            importlib.import_module(f"duoka.frameworks.{name}.forking").pin_one_thread()
