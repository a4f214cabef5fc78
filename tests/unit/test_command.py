"""The command that started a process is found again, whatever the user did meanwhile."""

import json
import os
import subprocess
import sys
import zipfile
from types import ModuleType, SimpleNamespace

import pytest

from duoka.errors import LaunchError
from duoka.runtime.command import Command, from_process, from_words, why_not_here
from tests.limits import START_S

SHOW = """
import os, sys
sys.argv[1:] = ["edited"]
os.chdir("/")
from duoka.runtime.command import from_process
found = from_process(sys.orig_argv, sys.argv, sys.modules["__main__"], os.getcwd())
print(found and found.to_json())
"""


def run_python(*words, cwd, stdin=None):
    """Start a real interpreter on a program that prints the command it found; give that command."""
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, input=stdin, capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    return None if line == "None" else Command.from_json(line)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "a b"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").write_text("")
    for name in ("train.py", "pkg/mod.py", "pkg/__main__.py", "-odd.py"):
        (folder / name).write_text(SHOW)
    with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    return folder


def test_a_script_is_found_after_chdir_and_edited_argv(folder):
    found = run_python("train.py", "--lr", "0.1", "-m", cwd=folder)
    assert found == Command((sys.executable,), None, str(folder / "train.py"), ("--lr", "0.1", "-m"), str(folder))


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (["-u"], ["-u"]),
        (["-uB", "-X", "dev"], ["-uB", "-X", "dev"]),
        (["-Xdev", "-Wdefault"], ["-Xdev", "-Wdefault"]),
        (["-uW", "default"], ["-uW", "default"]),
        (["--check-hash-based-pycs", "always", "-OO"], ["--check-hash-based-pycs", "always", "-OO"]),
        (["-s", "--"], ["-s"]),
    ],
)
def test_flags_of_the_interpreter_are_kept(folder, flags, kept):
    found = run_python(*flags, "train.py", "x", cwd=folder)
    assert found.interpreter == (sys.executable, *kept)
    assert found.script == str(folder / "train.py")
    assert found.arguments == ("x",)


def test_a_script_whose_name_starts_with_a_dash_follows_two_dashes(folder):
    assert run_python("--", "-odd.py", cwd=folder).script == str(folder / "-odd.py")


@pytest.mark.parametrize(
    ("words", "flags", "module"),
    [
        (["-um", "pkg.mod", "x"], ["-u"], "pkg.mod"),
        (["-mpkg", "x"], [], "pkg"),
        (["-X", "dev", "-m", "pkg", "x"], ["-X", "dev"], "pkg"),
    ],
)
def test_a_module_is_found_with_its_flags(folder, words, flags, module):
    found = run_python(*words, cwd=folder)
    assert found == Command((sys.executable, *flags), module, None, ("x",), "/")


@pytest.mark.parametrize("target", ["pkg", "pkg/", "./pkg", "app.pyz", "./train.py", "pkg/../train.py"])
def test_directories_archives_and_untidy_paths_are_scripts(folder, target):
    found = run_python(target, "x", cwd=folder)
    assert found.script == os.path.normpath(folder / target)
    assert found.arguments == ("x",)


def test_a_path_through_a_symbolic_link_is_not_shortened_to_another_place(folder, tmp_path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "train.py").write_text(SHOW)
    (folder / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    found = run_python("link/../train.py", cwd=folder)
    assert os.path.samefile(found.script, tmp_path / "elsewhere" / "train.py")


def test_code_stdin_and_interactive_runs_cannot_be_started_again(folder):
    assert run_python("-c", SHOW, cwd=folder) is None
    assert run_python("-uc", SHOW, cwd=folder) is None
    assert run_python("-", cwd=folder, stdin=SHOW) is None
    assert run_python(cwd=folder, stdin=SHOW) is None
    assert run_python("-i", "train.py", cwd=folder, stdin="") is None


def test_a_script_that_came_through_a_pipe_cannot_be_started_again(folder):
    done = subprocess.run(
        ["bash", "-c", '"$1" <(cat train.py)', "-", sys.executable],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.stdout.strip() == "None", done.stderr


def test_a_script_that_was_deleted_cannot_be_started_again(tmp_path):
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "gone.py")
    assert from_process(["python", "gone.py"], ["gone.py"], main, str(tmp_path)) is None


def test_a_long_flag_of_a_later_python_is_understood_with_the_help_of_argv(folder):
    main = ModuleType("__main__")
    main.__file__ = str(folder / "train.py")
    found = from_process(["python", "--new", "value", "train.py", "x"], ["train.py", "x"], main, str(folder))
    assert found.interpreter[1:] == ("--new", "value")
    assert (found.script, found.arguments) == (str(folder / "train.py"), ("x",))


def test_a_command_survives_json_even_with_bytes_that_are_no_text():
    command = Command(("python", "-u"), None, "/a/多卡.py", ("caf\udce9", ""), "/a")
    text = command.to_json()
    assert text.isascii() and json.loads(text)["module"] is None
    assert Command.from_json(text) == command


def test_words_after_run_name_a_script_or_a_module(folder):
    assert from_words(["train.py", "-m", "x"], "python", str(folder)) == Command(
        ("python",), None, str(folder / "train.py"), ("-m", "x"), str(folder)
    )
    assert from_words(["-m", "pkg.mod", "x"], "python", str(folder)).module == "pkg.mod"
    assert from_words(["pkg"], "python", str(folder)).script == str(folder / "pkg")


def test_a_misspelt_script_is_answered_with_its_neighbours(folder):
    with pytest.raises(LaunchError, match=r"no script trian\.py") as caught:
        from_words(["trian.py"], "python", str(folder))
    assert "train.py" in caught.value.do
    with pytest.raises(LaunchError, match="no directory"):
        from_words(["nowhere/train.py"], "python", str(folder))


def test_a_directory_without_main_is_answered_with_its_scripts(folder):
    (folder / "pkg" / "__main__.py").unlink()
    with pytest.raises(LaunchError, match=r"no __main__\.py") as caught:
        from_words(["pkg"], "python", str(folder))
    assert "pkg/mod.py" in caught.value.do


@pytest.mark.parametrize("words", [[], ["-m"]])
def test_nothing_to_run_is_an_error(words):
    with pytest.raises(LaunchError, match="nothing to run"):
        from_words(words)


def reason(main_file=__file__, **changes):
    main = ModuleType("__main__")
    main.__file__ = main_file
    for name, value in changes.pop("names", {}).items():
        setattr(main, name, value)
    given = {
        "main_module": main,
        "modules": {"sys"},
        "is_main_thread": True,
        "trace": None,
        "orig_argv": ["python", "train.py"],
    }
    return why_not_here(**{**given, **changes})


def test_a_plain_script_may_be_replaced():
    assert reason() is None


def test_pdb_and_ipython_that_are_merely_imported_do_no_harm():
    assert reason(modules={"pdb", "bdb", "IPython"}) is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"main_file": "<stdin>"}, "no file"),
        ({"main_file": None}, "no file"),
        ({"is_main_thread": False}, "main thread"),
        ({"modules": {"pytest"}}, "pytest"),
        ({"modules": {"pydevd"}}, "debugger (pydevd)"),
        ({"orig_argv": ["python", "-m", "pdb", "train.py"]}, "debugger (pdb)"),
        ({"orig_argv": ["python", "-i", "train.py"]}, "python -i"),
        ({"modules": {"IPython"}, "names": {"get_ipython": print}}, "IPython"),
        (
            {"modules": {"ipykernel"}, "names": {"__builtins__": SimpleNamespace(get_ipython=print)}},
            "IPython",
        ),
        ({"is_multiprocessing_child": True}, "multiprocessing"),
        ({"monitors": ["coverage"]}, "coverage"),
        ({"monitors": ["cProfile"]}, "cProfile"),
        ({"trace": reason}, "test_command.reason"),
    ],
)
def test_the_reason_against_a_replacement_is_named(changes, word):
    assert word in reason(**changes)


def test_pdb_and_coverage_are_told_apart_by_their_trace_functions():
    import pdb

    class CTracer:
        def __call__(self, *args):
            return self

    CTracer.__module__ = "coverage.tracer"
    assert "debugger (pdb)" in reason(trace=pdb.Pdb().trace_dispatch)
    assert "coverage measures" in reason(trace=CTracer())
