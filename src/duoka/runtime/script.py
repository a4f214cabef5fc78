"""Run the user's program as ``__main__`` inside a worker, and show its errors as Python would have."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import pkgutil
import sys
import sysconfig
import traceback
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any, cast

from duoka.errors import DuokaError, LaunchError
from duoka.runtime.command import Command


def run_as_main(command: Command) -> None:
    """Run the program as ``python script.py ...`` or ``python -m module ...`` would, in this process.

    Its module stays in ``sys.modules`` afterwards, so threads, ``atexit`` handlers and pickles still find
    its globals. Exceptions of the program, SystemExit included, come out as they are. ``sys.argv[0]`` is the
    absolute path of a script. The working directory is the caller's business.
    """
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    if command.module is not None:
        code = _load_module(main, command.module, command)
    else:
        assert command.script is not None
        code = _load_script(main, command.script, command)
    exec(code, vars(main))


def user_traceback(error: BaseException) -> str:
    """Format an error with its causes, starting at the user's first frame.

    A script that cannot be compiled is shown as Python shows it: file, line and caret, no frames. One of our
    own errors says itself what happened: it is shown with the user's frames alone.
    """
    shown = traceback.TracebackException.from_exception(error)
    _drop_own_frames(shown)
    if isinstance(error, DuokaError):
        users = [frame for frame in shown.stack if is_users_file(frame.filename)]
        shown.stack[:] = users or shown.stack  # not a model's layers either: a hook of ours may raise from within them
        while len(shown.stack) > 1 and shown.stack[-1].filename.startswith(_PACKAGE):
            del shown.stack[-1]
    return "".join(shown.format())


def is_users_file(filename: str) -> bool:
    """Tell whether a file is neither Duoka's nor a library's.

    >>> is_users_file("/home/me/train.py"), is_users_file(os.__file__)
    (True, False)
    """
    return not filename.startswith(_NOT_THE_USERS)


def _load_script(main: ModuleType, script: str, command: Command) -> CodeType:
    sys.argv = [script, *command.arguments]
    if pkgutil.get_importer(script) is not None:
        _leave_first_path()
        sys.path.insert(0, script)  # even under -P and -I, as Python does for archives and directories
        spec = PathFinder.find_spec("__main__", [script])
        if spec is None:
            raise LaunchError(f"{script} cannot be run.", why="it has no __main__.py.", do="name a script in it.")
        return _load_spec(main, spec)
    if _leave_first_path():
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    if script.endswith(".pyc"):
        sourceless = SourcelessFileLoader("__main__", script)
        vars(main).update(__file__=script, __loader__=sourceless)
        return cast(CodeType, sourceless.get_code("__main__"))
    vars(main).update(__file__=script, __loader__=SourceFileLoader("__main__", script))
    with io.open_code(script) as file:
        # dont_inherit: the __future__ imports of this file are not the user's.
        return compile(file.read(), script, "exec", dont_inherit=True)


def _load_module(main: ModuleType, name: str, command: Command) -> CodeType:
    sys.argv = ["-m", *command.arguments]  # what CPython shows to a package imported on the way
    if _leave_first_path():
        sys.path.insert(0, command.directory)
    spec = _find_spec(name, command)
    if spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__", command)
    code = _load_spec(main, spec)
    sys.argv[0] = spec.origin or name
    return code


def _load_spec(main: ModuleType, spec: ModuleSpec) -> CodeType:
    vars(main).update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    code = cast(Any, spec.loader).get_code(spec.name) if hasattr(spec.loader, "get_code") else None
    if code is None:
        raise LaunchError(f"{spec.name} cannot be run.", why="there is no Python code behind it.")
    return cast(CodeType, code)


def _find_spec(name: str, command: Command) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # An import that fails inside a parent package is the user's error, and is shown as such.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is not None:
        return spec
    if name == f"{command.module}.__main__":
        raise LaunchError(
            f"The package {command.module} cannot be run.",
            why=f"it has no module {name}.",
            do="name a module in it, or add a __main__.py.",
        )
    raise LaunchError(
        f"There is no module {name}.",
        why=f"it is neither in {command.directory} nor installed for {sys.executable}.",
        do="start in the directory that holds it, or install it.",
    )


def _leave_first_path() -> bool:
    """Take out the entry of ``sys.path`` that Python made for our start; False if it made none (-P, -I)."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        return False
    del sys.path[0]
    return True


_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.join(os.path.dirname(_HERE), "")
_SCRIPT = os.path.join(_HERE, "script.py")
_HOOK = os.path.join(_HERE, "import_hook.py")
_IMPORTLIB = os.path.dirname(importlib.util.__file__)
_BOOTSTRAP = {
    _SCRIPT,
    _HOOK,
    os.path.join(_HERE, "worker.py"),
    *(os.path.join(_IMPORTLIB, name) for name in ("__init__.py", "util.py")),
}
_FROZEN = ("<frozen importlib", "<frozen runpy")
_LIBRARIES = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_THE_USERS = (_PACKAGE, "<", *(os.path.join(path, "") for path in _LIBRARIES))


def _drop_own_frames(shown: traceback.TracebackException) -> None:
    """Cut the frames that led to the user's first one, here and in every cause."""
    seen: set[int] = set()
    rest: list[traceback.TracebackException | None] = [shown]
    while rest:
        one = rest.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if _SCRIPT in (files := [frame.filename for frame in one.stack]):
            del one.stack[: files.index(_SCRIPT)]  # whoever called us
        while one.stack and _is_bootstrap(one.stack[0].filename):
            del one.stack[0]
        if any(frame.filename == _HOOK for frame in one.stack):
            # Our hook between two frames of importlib has kept Python from hiding them itself.
            one.stack[:] = [frame for frame in one.stack if not _is_hook(frame.filename)]
        _drop_frames_between(one.stack)
        rest += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]


def _drop_frames_between(stack: traceback.StackSummary) -> None:
    """Those of ours through which user code was called by user code: a callback in a fit. What comes after it stays."""
    users = [place for place, frame in enumerate(stack) if not frame.filename.startswith(_NOT_THE_USERS)]
    last = users[-1] if users else 0
    stack[:last] = [frame for frame in stack[:last] if not frame.filename.startswith(_PACKAGE)]


def _is_bootstrap(filename: str) -> bool:
    return filename in _BOOTSTRAP or filename.startswith(_FROZEN)


def _is_hook(filename: str) -> bool:
    return filename == _HOOK or filename.startswith("<frozen importlib")
