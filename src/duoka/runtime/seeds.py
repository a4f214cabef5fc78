"""Equal seeds on all workers before user code: building a model then gives equal weights everywhere."""

from __future__ import annotations

import importlib
import random
import sys
from types import ModuleType

from duoka.runtime.import_hook import after_import

_FRAMEWORKS = ("torch", "tensorflow", "keras")


def seed_everything(seed: int) -> None:
    """Seed Python and NumPy now, and each framework the moment the script has imported it."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    for name in _FRAMEWORKS:
        _seed_after_import(name, seed)


def seed_frameworks_to_come(seed: int) -> None:
    """For a forked worker: what its parent had, equal on all, stays; what is imported later is made equal."""
    for name in _FRAMEWORKS:
        if name not in sys.modules:
            _seed_after_import(name, seed)


def _seed_after_import(name: str, seed: int) -> None:
    def seed_framework(module: ModuleType) -> None:
        importlib.import_module(f"duoka.frameworks.{name}.seeds").seed(seed)

    after_import(name, seed_framework)
