import subprocess
import sys

from tests.limits import START_S

HEAVY = {"torch", "tensorflow", "keras", "jax", "numpy", "rich", "psutil", "pynvml"}


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=START_S
    ).stdout


def test_importing_duoka_loads_nothing_heavy_and_starts_no_thread():
    code = "import sys, threading, duoka; print(*sys.modules); assert threading.active_count() == 1"
    assert not HEAVY & {name.split(".")[0] for name in run(code).split()}


def test_importing_duoka_reads_no_environment_variable():
    code = (
        "import os, sys\n"
        "class Watched(dict):\n"
        "    def __getitem__(self, key): raise AssertionError(key)\n"
        "    get = __contains__ = __getitem__\n"
        "real = os.environ; os.environ = Watched(); os.getenv = Watched().get\n"
        "import duoka\n"
        "os.environ = real"
    )
    run(code)


def test_the_supervisor_loads_no_framework_and_no_numpy():
    modules = run("import sys, duoka.runtime.run; print(*sys.modules)").split()
    assert not HEAVY & {name.split(".")[0] for name in modules}


def test_every_public_name_can_be_touched():
    assert run("import duoka; print(all(hasattr(duoka, name) for name in duoka.__all__))").strip() == "True"


def test_duoka_devices_is_a_function_before_and_after_its_folder_was_imported():
    code = "import duoka; print(len(duoka.devices()) > 0); import duoka.devices.cpu; print(len(duoka.devices()) > 0)"
    assert run(code).split() == ["True", "True"]
