"""`strategy.launch`: a function on several workers from a process that has no script to start again; and refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import textwrap

import pytest

from tests.limits import START_S
from tests.process.scripts import PYTHON, Run, write


def run_code(directory, source: str) -> Run:
    """Like a notebook: code without a file behind it."""
    return Run(directory, [*PYTHON, "-c", textwrap.dedent(source)])


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """One process that launches again and again; what came of it by name, and what was printed."""
    source = """
        import json, os, random, signal, sys, threading, time
        import duoka
        import numpy as np

        strategy = duoka.Mirrored(devices=2, deadline_s=20)
        told = {}
        started_in = os.getpid()

        def attempt(name, function, *args):
            try:
                told[name] = strategy.launch(function, *args)
            except duoka.DuokaError as error:
                told[name] = [type(error).__name__, str(error)]

        def results(scale):
            total = strategy.sum(np.arange(3.0) * scale)
            return {"list": [1, None, "多卡", True], "nan": float("nan"), "array": total, "tuple": (1, 2.5)}

        def places():
            numbers = strategy.gather(np.array([os.getpid(), os.getppid(), os.getpgrp()]))
            return [part.tolist() for part in numbers] + [strategy.num_workers, strategy.device.name]

        def equal_numbers():
            return strategy.gather(np.array([random.random(), np.random.rand()]))

        def environ():
            names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "DUOKA_WORKER")
            return {name: os.environ.get(name) for name in names}

        def fail():
            if strategy.worker == 1:
                raise ValueError("not on this worker")
            strategy.barrier()

        def lose():
            if strategy.worker == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return float(strategy.sum_over_replicas(lambda replica: 1.0 + replica))

        attempt("results", results, 2.0)
        attempt("places", places)
        attempt("equal_numbers", equal_numbers)
        attempt("environ", environ)
        attempt("prints", lambda: print("from worker", strategy.worker))
        attempt("large", lambda: np.ones((1000, 1000)).sum() + np.zeros(10**6))
        attempt("fail", fail)
        attempt("exit", lambda: sys.exit(3))
        attempt("nothing", lambda: os._exit(0))
        attempt("object", lambda: object())
        attempt("nested", lambda: strategy.launch(print))
        attempt("lose", lose)
        attempt("outside", places)
        thread = threading.Thread(target=attempt, args=["thread", lambda: strategy.num_workers])
        thread.start()
        thread.join()
        for name in ("worker", "device", "is_main", "local_replicas"):
            try:
                getattr(strategy, name)
            except duoka.DuokaError as error:
                told["outside " + name] = [type(error).__name__, str(error)]
        try:
            strategy.barrier()
        except duoka.DuokaError as error:
            told["outside barrier"] = [type(error).__name__, str(error)]
        told["pid"] = started_in == os.getpid()

        def plain(value):
            if isinstance(value, np.ndarray):
                return {"array": value.tolist()[:5], "size": value.size, "dtype": str(value.dtype)}
            return repr(value)

        print(json.dumps(told, default=plain))
        """
    going = run_code(tmp_path_factory.mktemp("notebook"), source)
    ended = going.finish()
    assert ended.code == 0, ended.err
    assert not (ended.directory / "runs").exists()
    told = json.loads(ended.out.splitlines()[-1])
    told["pid of the parent"] = going.process.pid
    return told, ended


def test_launch_returns_json_values_and_arrays(notebook):
    result = notebook[0]["results"]
    assert result["list"] == [1, None, "多卡", True] and result["tuple"] == [1, 2.5]
    assert result["nan"] != result["nan"]
    assert result["array"] == {"array": [0.0, 4.0, 8.0], "size": 3, "dtype": "float64"}
    assert notebook[0]["large"] == {"array": [1e6] * 5, "size": 10**6, "dtype": "float64"}


def test_launched_workers_are_forks_that_lead_their_own_groups(notebook):
    told, _ = notebook
    first, second, num_workers, device = told["places"]
    assert first[0] != second[0] and first[1] == second[1] == told["pid of the parent"]
    assert (first[2], second[2]) == (first[0], second[0])
    assert (num_workers, device) == (2, "cpu:0/v0")


def test_launched_workers_draw_equal_numbers_and_see_their_own_device_and_one_thread(notebook):
    told, _ = notebook
    first, second = told["equal_numbers"]
    assert first["array"] == second["array"]
    assert told["environ"] == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DUOKA_WORKER": None}


def test_what_launched_workers_print_appears_with_their_number(notebook):
    assert "\nfrom worker 0\n" in "\n" + notebook[1].out
    assert "[w1] from worker 1\n" in notebook[1].out


def test_a_failure_in_a_launched_function_is_raised_with_its_own_traceback(notebook):
    kind, text = notebook[0]["fail"]
    assert kind == "LaunchError"
    assert text.startswith("1 worker stopped because worker 1 (cpu:0/v1) failed:")
    assert "in fail\n" in text and "ValueError: not on this worker" in text
    assert "exited with code 3." in notebook[0]["exit"][1]
    assert notebook[0]["nothing"] == ["LaunchError", "No worker came back with a result."]
    assert "MismatchError: A value of type object cannot be sent." in notebook[0]["object"][1]
    assert "launch() was called inside a worker" in notebook[0]["nested"][1]


def test_a_worker_lost_in_a_launched_function_changes_no_result(notebook):
    told, ended = notebook
    assert told["lose"] == 3.0
    assert "worker 0 (cpu:0/v0) was ended by SIGKILL; 1 worker goes on (generation 1)." in ended.err


def test_launch_works_again_after_failures_and_from_another_thread(notebook):
    assert notebook[0]["outside"][2] == 2
    assert notebook[0]["thread"] == 2


def test_outside_of_launch_several_workers_are_an_error_that_names_both_ways_out(notebook):
    for name in ("worker", "device", "is_main", "local_replicas", "barrier"):
        kind, text = notebook[0][f"outside {name}"]
        assert kind == "LaunchError"
        assert text.startswith("2 workers cannot be started from here by themselves.")
        assert "strategy.launch(function)" in text and "`duoka run script.py`" in text


# Where a process must not be replaced: one worker runs in place, more are an error.
IN_PLACE = """
import multiprocessing, os, sys, threading
import duoka

def check(where):
    here = os.getpid()
    one = duoka.Mirrored(devices=1, replicas=2)
    assert float(one.sum_over_replicas(lambda replica: 1.0)) == 2.0 and os.getpid() == here
    try:
        duoka.Mirrored(devices=2).sum(1.0)
    except duoka.DuokaError as error:
        assert "strategy.launch(function)" in str(error) and "`duoka run script.py`" in str(error)
        print(where, "|", str(error).splitlines()[1], flush=True)
"""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-c", IN_PLACE + "check('code')"], "no file behind __main__"),
        (["-"], "no file behind __main__"),
        (["-m", "pdb", "-c", "continue", "script.py"], "a debugger (pdb)"),
        (["-i", "script.py"], "python -i"),
    ],
    ids=["code", "standard input", "debugger", "interactive"],
)
def test_a_process_that_cannot_be_started_again_stays_in_place(tmp_path, words, reason):
    script = write(tmp_path, IN_PLACE + "check('script')\n")
    with open(script) as file:
        stdin = file if words == ["-"] else subprocess.DEVNULL
        ended = Run(tmp_path, [*PYTHON, *words], stdin=stdin).finish()
    (line,) = [line for line in ended.out.splitlines() if " |   why  " in line]
    assert reason in line


def test_threads_pytest_and_children_of_multiprocessing_stay_in_place(tmp_path):
    source = (
        IN_PLACE
        + """
if __name__ == "__main__":
    thread = threading.Thread(target=check, args=["thread"])
    thread.start()
    thread.join()
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=check, args=[method])
        child.start()
        child.join()
    import pytest
    check("pytest")
"""
    )
    write(tmp_path, source)
    ended = Run(tmp_path, [*PYTHON, "script.py"]).finish()
    assert ended.code == 0, ended.err
    reasons = dict(line.split(" |   why  ") for line in ended.out.splitlines())
    assert list(reasons) == ["thread", "fork", "spawn", "pytest"]
    assert "not the main thread" in reasons["thread"] and "pytest is loaded" in reasons["pytest"]
    assert "child of multiprocessing" in reasons["fork"] and "child of multiprocessing" in reasons["spawn"]


LAUNCHING = """
import os, signal, subprocess, sys, time
import duoka
strategy = duoka.Mirrored(devices=2)

def wait():
    subprocess.Popen(["sleep", "60"])
    strategy.barrier()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_an_interrupt_of_launch_ends_the_workers_and_leaves_the_notebook_alive(tmp_path):
    source = (
        LAUNCHING
        + """
try:
    strategy.launch(wait)
except KeyboardInterrupt:
    print("interrupted")
print(strategy.launch(lambda: strategy.num_workers), "again")
"""
    )
    going = run_code(tmp_path, source)
    going.wait_for("ready")
    going.signal(signal.SIGINT)
    ended = going.finish(START_S)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-2:] == ["interrupted", "2 again"]
    assert "Traceback" not in ended.err


def test_kill_9_of_the_notebook_ends_its_workers(tmp_path):
    going = run_code(tmp_path, LAUNCHING + "strategy.launch(wait)")
    going.wait_for("ready")
    assert len(going.alive()) >= 5
    going.process.kill()
    going.wait_until_all_are_gone()


@pytest.mark.torch
def test_launch_works_after_torch_has_computed_and_refuses_once_cuda_is_initialised(tmp_path):
    source = """
        import torch
        import duoka
        torch.set_num_threads(2)
        (torch.ones(600, 600) @ torch.ones(600, 600)).sum()  # its threads do not survive the fork
        strategy = duoka.Mirrored(devices=2)

        def compute():
            total = strategy.sum((torch.ones(600, 600) @ torch.ones(600, 600)).sum())
            return [float(total), torch.get_num_threads()]

        print(strategy.launch(compute))
        torch.cuda._initialized = True
        try:
            strategy.launch(compute)
        except duoka.DuokaError as error:
            print(error)
        """
    ended = run_code(tmp_path, source).finish(START_S)
    assert ended.code == 0, ended.err
    first, *rest = ended.out.splitlines()
    assert first == f"[{2.0 * 600**3}, 1]"
    assert rest[0] == "Workers cannot be forked from this process."
    assert "CUDA does not survive a fork" in rest[1] and "`duoka run script.py`" in rest[2]
