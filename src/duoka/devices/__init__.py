"""What can compute here: names, discovery, virtual devices, memory limits. Imports no framework."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _CallableFolder(types.ModuleType):
    """A package that is also the public function ``duoka.devices()``."""

    def __call__(self) -> Any:
        # Importing anything below this folder makes Python bind `duoka.devices` to the folder, in place of
        # the public function of that name: without this, duoka.devices() would work or not depending on
        # what ran before. By name, because the session is a layer above, looked up only when a user calls.
        return importlib.import_module("duoka.here").devices()


sys.modules[__name__].__class__ = _CallableFolder
