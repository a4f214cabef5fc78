"""A program run inside a worker cannot tell that it was not started by Python itself."""

import json
import subprocess
import sys
import zipfile

import pytest

from duoka.runtime.command import Command
from tests.limits import START_S

START = """
import sys
from duoka.runtime.command import Command
from duoka.runtime.script import run_as_main, user_traceback
try:
    run_as_main(Command.from_json({command!r}))
except SystemExit:
    raise
except BaseException as error:
    sys.stderr.write(user_traceback(error))
    sys.exit(1)
"""

SHOW = """
'''The docstring.'''
import json, os, sys
main = sys.modules["__main__"]
facts = {name: value for name, value in vars(main).items() if name[:2] == "__" and isinstance(value, str)}
facts["__annotations__"] = dict(__annotations__)
facts["package"], facts["cached"] = __package__, __cached__
facts["spec"] = __spec__ and [__spec__.name, __spec__.origin]
facts["loader"] = type(__loader__).__name__
facts["builtins"] = type(__builtins__).__name__
facts["argv"], facts["path"] = [os.path.abspath(sys.argv[0]), *sys.argv[1:]], sys.path
facts["is_globals"] = vars(main) is globals()
print(json.dumps(facts))
"""


def run(*words, cwd, flags=()):
    return subprocess.run([sys.executable, *flags, *words], cwd=cwd, capture_output=True, text=True, timeout=START_S)


def run_inside(cwd, *arguments, script=None, module=None, flags=()):
    """Run a program in a process of ours, as a worker would."""
    path = str(cwd / script) if script else None
    command = Command((sys.executable, *flags), module, path, arguments, str(cwd))
    return run("-c", START.format(command=command.to_json()), cwd=cwd, flags=flags)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "train.py").symlink_to(tmp_path / "train.py")
    for name in ("train.py", "pkg/mod.py", "pkg/__main__.py"):
        (tmp_path / name).write_text(SHOW)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    return tmp_path


@pytest.mark.parametrize("flags", [(), ("-I",)])
@pytest.mark.parametrize("script", ["train.py", "links/train.py", "pkg", "app.pyz"])
def test_a_script_sees_what_python_would_show_it(folder, script, flags):
    real = run(script, "x", cwd=folder, flags=flags)
    ours = run_inside(folder, "x", script=script, flags=flags)
    assert real.returncode == 0 and ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout) == json.loads(real.stdout)


@pytest.mark.parametrize("module", ["pkg.mod", "pkg", "train"])
def test_a_module_sees_what_python_would_show_it(folder, module):
    real = run("-m", module, "x", cwd=folder)
    ours = run_inside(folder, "x", module=module)
    assert real.returncode == 0 and ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout) == json.loads(real.stdout)


def test_future_imports_of_ours_do_not_leak_into_the_script(folder):
    (folder / "train.py").write_text("x: 1 + 1 = 0\nprint(__annotations__)\n")
    assert run_inside(folder, script="train.py").stdout == "{'x': 2}\n"


def test_exit_handlers_and_threads_still_see_the_globals(folder):
    (folder / "train.py").write_text(
        "import atexit, threading, time\n"
        "word = 'kept'\n"
        "def late():\n"
        "    time.sleep(0.2); print('thread', word)\n"
        "threading.Thread(target=late).start()\n"
        "atexit.register(lambda: print('atexit', word))\n"
    )
    assert run_inside(folder, script="train.py").stdout == "thread kept\natexit kept\n"


SPAWN = """
import multiprocessing
def double(x):
    return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""


@pytest.mark.parametrize("how", [{"script": "train.py"}, {"module": "pkg.mod"}])
def test_spawned_children_find_functions_of_the_script(folder, how):
    for name in ("train.py", "pkg/mod.py"):
        (folder / name).write_text(SPAWN)
    done = run_inside(folder, **how)
    assert done.stdout == "[2, 4]\n", done.stderr


def test_a_compiled_script_runs(folder):
    run("-m", "compileall", "-q", "-b", "train.py", cwd=folder)
    assert run_inside(folder, script="train.pyc").returncode == 0


def test_the_exit_code_of_the_script_is_kept(folder):
    (folder / "train.py").write_text("raise SystemExit(7)")
    assert run_inside(folder, script="train.py").returncode == 7


FAILURES = {
    "plain": "def f():\n    1 / 0\nf()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('bad') from e\n",
    "syntax": "x = 1\nif x\n    pass\n",
    "import": "import pkg.broken\n",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_looks_as_python_would_show_it(folder, failure):
    (folder / "train.py").write_text(FAILURES[failure])
    (folder / "pkg" / "broken.py").write_text("import nowhere\n")
    real = run(str(folder / "train.py"), cwd=folder)
    ours = run_inside(folder, script="train.py")
    assert "Error" in ours.stderr
    assert ours.stderr == real.stderr


def test_an_error_in_the_package_of_a_module_starts_in_the_package(folder):
    (folder / "pkg" / "__init__.py").write_text("1 / 0\n")
    shown = run_inside(folder, module="pkg.mod").stderr
    assert shown.splitlines()[1].startswith(f'  File "{folder}/pkg/__init__.py", line 1')
    assert "script.py" not in shown and "importlib" not in shown


def test_groups_are_cut_to_the_frames_of_the_user(folder):
    if sys.version_info < (3, 11):
        pytest.skip("exception groups came with Python 3.11")
    (folder / "train.py").write_text("raise ExceptionGroup('two', [ValueError(1), TypeError(2)])\n")
    real = run(str(folder / "train.py"), cwd=folder)
    assert run_inside(folder, script="train.py").stderr == real.stderr


def test_an_import_hook_of_ours_leaves_no_frames(folder):
    (folder / "watched.py").write_text("1 / 0\n")
    (folder / "train.py").write_text(
        "from duoka.runtime.import_hook import after_import\nafter_import('watched', print)\nimport watched\n"
    )
    files = [line for line in run_inside(folder, script="train.py").stderr.splitlines() if "File" in line]
    assert [line.split('"')[1] for line in files] == [str(folder / "train.py"), str(folder / "watched.py")]


CALLED_BACK = """
from duoka.events import Parted, emit, listen

def mine(event):
    {deed}

listen(mine)
emit(Parted(0, ""))
"""


@pytest.mark.parametrize(("deed", "frames"), [("1 / 0", ["<module>", "mine"]), ("emit(1, 2)", ["<module>", "mine"])])
def test_frames_of_ours_between_those_of_the_user_are_left_out(folder, deed, frames):
    (folder / "train.py").write_text(CALLED_BACK.format(deed=deed))
    error = run_inside(folder, script="train.py").stderr
    assert [line.split(", in ")[1] for line in error.splitlines() if line.startswith("  File")] == frames, error


def test_frames_of_ours_below_the_last_one_of_the_user_stay(folder):
    (folder / "train.py").write_text("from duoka.events import listen\nend = listen(print)\nend()\nend()\n")
    error = run_inside(folder, script="train.py").stderr
    assert "events.py" in error and "train.py" in error, error


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("nowhere", "There is no module nowhere"),
        ("nowhere.deep", "There is no module"),
        ("bare", "bare.__main__"),
    ],
)
def test_a_module_that_cannot_be_run_is_explained(folder, module, words):
    (folder / "bare").mkdir()
    (folder / "bare" / "__init__.py").write_text("")
    shown = run_inside(folder, module=module).stderr
    assert words in shown and "do " in shown


def test_an_import_that_fails_in_a_parent_package_is_not_taken_for_a_missing_module(folder):
    (folder / "pkg" / "__init__.py").write_text("import nowhere\n")
    assert "ModuleNotFoundError: No module named 'nowhere'" in run_inside(folder, module="pkg.mod").stderr
