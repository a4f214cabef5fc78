"""What is being run: the interpreter, the program and its arguments, so that workers can run it again."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from duoka.errors import LaunchError

FLAG_WITH_VALUE = "--check-hash-based-pycs"
KNOWN_LONG_FLAGS = {"--help", "--help-all", "--help-env", "--help-xoptions", "--version"}
# pdb is not among them: `import tensorflow` loads it, so its presence says nothing.
DEBUGGER_MODULES = ("debugpy", "pydevd", "_pydevd_bundle")
DEBUGGER_PROGRAMS = {"debugpy", "ipdb", "pdb", "pudb"}


@dataclass(frozen=True)
class Command:
    """A program that can be started again: exactly one of ``module`` and ``script`` is set."""

    interpreter: tuple[str, ...]
    module: str | None
    script: str | None
    arguments: tuple[str, ...]
    directory: str

    def to_json(self) -> str:
        """Write it as one line of ASCII; arguments that are not valid UTF-8 survive."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Command:
        fields = json.loads(text)
        fields["interpreter"] = tuple(fields["interpreter"])
        fields["arguments"] = tuple(fields["arguments"])
        return Command(**fields)


def from_process(
    orig_argv: Sequence[str],
    argv: Sequence[str],
    main_module: ModuleType,
    start_directory: str,
    executable: str = sys.executable,
) -> Command | None:
    """Find the command that started this process; None if it cannot be started again.

    Arguments come from ``sys.orig_argv``, because programs edit ``sys.argv``. A relative script is found
    through ``__main__.__file__``, which also tells where the process started: ``os.chdir`` does no harm.
    ``executable`` replaces the first word, which may be a bare ``python`` that only the shell could find.
    """
    line = _split(orig_argv, argv)
    if line is None or line.is_interactive or not executable:
        return None
    interpreter = (executable, *line.flags)
    if line.kind == "module" and _file_of(main_module) is not None:
        return Command(interpreter, line.target, None, line.arguments, start_directory)
    if line.kind == "script":
        script, directory = _locate(line.target, main_module, start_directory)
        if _is_runnable(script):
            return Command(interpreter, None, script, line.arguments, directory)
    return None


def from_words(words: Sequence[str], python: str = sys.executable, directory: str | None = None) -> Command:
    """Read ``[-m] target arguments...`` as typed after ``duoka run``.

    A script that is not there is a LaunchError that names its neighbours.
    """
    directory = directory or os.getcwd()
    is_module = list(words[:1]) == ["-m"]
    target, *arguments = words[is_module:] or [""]
    if not target:
        raise LaunchError(
            "There is nothing to run.",
            why="-m needs the name of a module." if is_module else "no script was given.",
            do="duoka run train.py, or duoka run -m package.module",
        )
    if is_module:
        return Command((python,), target, None, tuple(arguments), directory)
    script = _tidy(os.path.join(directory, target))
    if not os.path.exists(script):
        raise _no_such_script(target, Path(script))
    if os.path.isdir(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
        raise _no_main_in(target, Path(script))
    return Command((python,), None, script, tuple(arguments), directory)


def why_not_here(
    *,
    main_module: ModuleType,
    modules: Collection[str],
    is_main_thread: bool,
    trace: Callable[..., Any] | None,
    orig_argv: Sequence[str],
    monitors: Sequence[str] = (),
    is_multiprocessing_child: bool = False,
) -> str | None:
    """Give the reason why this process must not be replaced by the supervisor; None if it may.

    ``trace`` is ``sys.gettrace()``; ``monitors`` are the names of the tools that use ``sys.monitoring``;
    ``modules`` are the names in ``sys.modules``.
    """
    if is_multiprocessing_child:
        return "this process is a child of multiprocessing, and its parent waits for it."
    if _runs_in_ipython(main_module, modules):
        return "IPython runs this process (a notebook or its shell), and all its variables would be lost."
    if "pytest" in modules:
        return "pytest is loaded in this process, and replacing it would end the tests."
    if watcher := _watcher(modules, trace, orig_argv, monitors):
        return watcher
    if not _has_real_file(main_module):
        return "there is no file behind __main__ (python -c, standard input or a prompt) that workers could run."
    line = _split(orig_argv, ())
    if line is not None and line.is_interactive:
        return "python -i was asked to stay at a prompt after the script."
    if not is_main_thread:
        return "this is not the main thread, and the work of the others would be lost."
    return None


class _Line(NamedTuple):
    """A command line of the interpreter, taken apart."""

    flags: tuple[str, ...]
    kind: str  # "script", "module" or "code"
    target: str
    arguments: tuple[str, ...]
    is_interactive: bool


def _split(words: Sequence[str], argv: Sequence[str]) -> _Line | None:
    """Take a command line apart as CPython does; None if it names no program.

    ``argv`` helps only with long flags newer than this function: while it is a tail of ``words``, it tells
    how many words belong to the program.
    """
    flags: list[str] = []
    index, is_interactive = 1, False
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
        word = words[index]
        if word.startswith("--"):
            if word != FLAG_WITH_VALUE and word not in KNOWN_LONG_FLAGS and argv and _is_tail(argv[1:], words):
                end = max(index + 1, len(words) - len(argv))
            else:
                end = index + 1 + (word == FLAG_WITH_VALUE)
            flags += words[index:end]
            index = end
            continue
        # Short flags may be clustered; the first that takes a value takes the rest of the word, or the next.
        takes = next((at for at, letter in enumerate(word) if letter in "cmWX"), len(word))
        is_interactive |= "i" in word[:takes]
        end = index + 1 + (takes == len(word) - 1)
        if word[takes : takes + 1] in ("c", "m"):
            flags += [word[:takes]] if takes > 1 else []
            value = word[takes + 1 :] or "".join(words[index + 1 : end])
            kind = "module" if word[takes] == "m" else "code"
            return _Line(tuple(flags), kind, value, tuple(words[end:]), is_interactive)
        flags += words[index:end]
        index = end
    index += list(words[index : index + 1]) == ["--"]
    if index >= len(words) or words[index] == "-":
        return None
    return _Line(tuple(flags), "script", words[index], tuple(words[index + 1 :]), is_interactive)


def _is_tail(tail: Sequence[str], words: Sequence[str]) -> bool:
    return list(words[len(words) - len(tail) :]) == list(tail)


def _locate(word: str, main_module: ModuleType, start_directory: str) -> tuple[str, str]:
    """Make a script absolute; also give the directory the process started in."""
    main_file = _file_of(main_module) or ""
    target = word.rstrip("/") or word
    if not os.path.isabs(word) and os.path.isabs(main_file):
        for ending in (f"/{target}", f"/{target}/__main__.py"):
            if main_file.endswith(ending):
                start_directory = main_file.removesuffix(ending) or "/"
                break
    return _tidy(os.path.join(start_directory, target)), start_directory


def _tidy(path: str) -> str:
    """Take ``.`` and ``..`` out of a path, unless a symbolic link makes that another place."""
    plain = os.path.normpath(path)
    return plain if os.path.realpath(plain) == os.path.realpath(path) else path


def _is_runnable(path: str) -> bool:
    # Not `exists`: a pipe such as /dev/fd/63 has been read, and is empty for the workers.
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, "__main__.py"))


def _file_of(main_module: ModuleType) -> str | None:
    return getattr(main_module, "__file__", None)


def _has_real_file(main_module: ModuleType) -> bool:
    path = Path(_file_of(main_module) or "<none>")
    return path.is_file() or any(parent.is_file() for parent in path.parents)  # a parent: inside a zip archive


def _runs_in_ipython(main_module: ModuleType, modules: Collection[str]) -> bool:
    # Being loaded is not enough: plotting and progress libraries import IPython in plain scripts.
    if "IPython" not in modules and "ipykernel" not in modules:
        return False
    builtins = getattr(main_module, "__builtins__", None)
    names = builtins if isinstance(builtins, dict) else getattr(builtins, "__dict__", {})
    return hasattr(main_module, "get_ipython") or "get_ipython" in names


def _watcher(
    modules: Collection[str],
    trace: Callable[..., Any] | None,
    orig_argv: Sequence[str],
    monitors: Sequence[str],
) -> str | None:
    """Say who watches this process from inside and would lose sight of it."""
    tracer = _home_of(trace) if trace is not None else ""
    if tracer.split(".")[0] == "coverage" or "coverage" in monitors:
        return "coverage measures this process, and would see nothing of the workers."
    line = _split(orig_argv, ())
    loaded = next((name for name in DEBUGGER_MODULES if name in modules), "")
    started = line.target if line is not None and line.kind == "module" and line.target in DEBUGGER_PROGRAMS else ""
    tracing = tracer.split(".")[0] if tracer.split(".")[0] in {"bdb", *DEBUGGER_PROGRAMS} else ""
    if debugger := loaded or started or tracing:
        return f"a debugger ({debugger.replace('bdb', 'pdb')}) is at work in this process, and would lose it."
    if trace is not None:
        return f"a trace function is set ({tracer}), and would see nothing of the workers."
    if monitors:
        return f"{', '.join(monitors)} watches this process through sys.monitoring, and would lose it."
    return None


def _home_of(trace: Callable[..., Any]) -> str:
    """Name the function or the kind of object, with its module; for a method, those of its object."""
    named = trace if hasattr(trace, "__qualname__") and not hasattr(trace, "__self__") else None
    named = named or type(getattr(trace, "__self__", trace))
    return f"{named.__module__}.{named.__qualname__}"


def _no_such_script(target: str, script: Path) -> LaunchError:
    folder = script.parent
    if not folder.is_dir():
        return LaunchError(f"There is no script {target}.", why=f"there is no directory {folder}.")
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(script.name, names, n=3, cutoff=0.5)
    if not near:
        near = [name for name in names if name.endswith(".py")][:3]
    return LaunchError(
        f"There is no script {target}.",
        why=f"{folder} holds no file of this name.",
        do=f"did you mean {' or '.join(near)}?" if near else "check the path, or use -m for a module.",
    )


def _no_main_in(target: str, folder: Path) -> LaunchError:
    scripts = [path.name for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    near = difflib.get_close_matches("__main__.py", scripts, n=3, cutoff=0.5) or scripts[:3]
    choices = " or ".join(os.path.join(target, name) for name in near)
    return LaunchError(
        f"The directory {target} cannot be run.",
        why="it has no __main__.py.",
        do=f"did you mean {choices}?" if near else "name a script in it, or add a __main__.py.",
    )
