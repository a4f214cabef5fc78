"""Do something right after a module has been imported, without importing it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

Callback = Callable[[ModuleType], None]


def after_import(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` once, right after the top-level module ``name`` has finished importing.

    At once if it is imported already; never if it is never imported. An import that fails does not count,
    the next try does. What the callback raises comes out of the import statement as it is. Callbacks of the
    same name run in the order they were given.
    """
    assert "." not in name, "only top-level modules are watched"
    watch = _Watch(name, callback)
    module = sys.modules.get(name)
    if module is not None and not _is_lazy(module):
        _wait_for_other_threads(name, module)
        callback(sys.modules[name])
        return
    sys.meta_path.insert(0, watch)
    if module is not None:
        spec = _vars_of(module)["__spec__"]  # any plain access would load the module now
        spec.loader = _WatchedLoader(spec.loader, watch)


class _Watch(MetaPathFinder):
    """Finds the module as everybody else does, then slips between it and its loader."""

    def __init__(self, name: str, callback: Callback) -> None:
        self._name, self._callback = name, callback
        self._is_done = self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._is_done or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = self._ask_the_others(fullname, path, target)
        finally:
            self._is_searching = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _WatchedLoader(cast(Loader, spec.loader), self)
        return spec

    def _ask_the_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None

    def finish(self, module: ModuleType) -> None:
        if self._is_done:
            return
        self._is_done = True
        # A new list: removing in place makes an import that another thread is looking up skip a finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        self._callback(module)


class _WatchedLoader(Loader):
    """Stands in for a loader until the module is executed, and is gone before its first line runs."""

    def __init__(self, loader: Loader, watch: _Watch) -> None:
        self._loader, self._watch = loader, watch

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a half-built copy
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        attributes = _vars_of(module)
        spec = attributes["__spec__"]
        spec.loader = attributes["__loader__"] = self._loader
        self._loader.exec_module(module)
        # A module may have put another object in its own place.
        self._watch.finish(sys.modules.get(spec.name, module))


def _vars_of(module: ModuleType) -> dict[str, Any]:
    """Give a module's dictionary without waking it up if it is lazy."""
    return cast("dict[str, Any]", object.__getattribute__(module, "__dict__"))


def _is_lazy(module: ModuleType) -> bool:
    return issubclass(type(module), getattr(importlib.util, "_LazyModule", ()))


def _wait_for_other_threads(name: str, module: ModuleType) -> None:
    """Return when no thread is in the middle of importing the module."""
    spec = getattr(module, "__spec__", None)
    if getattr(spec, "_initializing", False):
        importlib.import_module(name)  # waits for the lock of the module
        assert not getattr(spec, "_initializing", False), f"called from inside the import of {name}"
