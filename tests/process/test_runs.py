"""Scripts run by `python script.py` and `duoka run`: what workers are given, what the user sees, what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import DUOKA_RUN, PYTHON, Run, run, start, write

# Everything about a worker that can be checked in one run. It goes elsewhere before it makes its strategy.
FACTS = """
import json, os, random, subprocess, sys
cwd = os.getcwd()
words = list({"apple", "pear", "plum", "cherry", "fig", "kiwi", "lemon", "mango"})
os.chdir("/")
import duoka
strategy = duoka.Mirrored(devices=2)
import numpy

NESTED = '''
import os, sys
import duoka
alone = duoka.Mirrored(devices=1)
assert (alone.worker, alone.num_workers) == (0, 1)
try:
    duoka.Mirrored(devices=2).worker
except duoka.DuokaError as error:
    print(type(error).__name__, "DUOKA_WORKER" in os.environ)
'''
with open(f"/proc/{os.getppid()}/maps") as file:
    parent_maps = file.read()
print(json.dumps({
    "worker": strategy.worker,
    "num_workers": strategy.num_workers,
    "device": strategy.device.name,
    "sum": float(strategy.sum(strategy.worker + 1.0)),
    "argv": sys.argv,
    "cwd": cwd,
    "name": __name__,
    "file": __file__,
    "first_path": sys.path[0],
    "flags": [sys.flags.optimize, sys.flags.dev_mode, sys.flags.utf8_mode],
    "set_order": words,
    "random": [random.random(), float(numpy.random.rand())],
    "environ": {name: os.environ.get(name) for name in (
        "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC", "PYTHONHASHSEED",
        "CUDA_VISIBLE_DEVICES", "DUOKA_WORKER")},
    "leads_its_group": os.getpgrp() == os.getpid(),
    "supervisor_maps_numpy": "numpy" in parent_maps,
    "nested": subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True).stdout.split(),
}))
"""
ARGUMENTS = ["two words", "多卡", "--devices", "", "a'b\"c"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """`python -O -X dev "scripts/多 train.py" ...`, with a forged identity and a trap in the working directory."""
    directory = tmp_path_factory.mktemp("plain")
    write(directory, FACTS, "scripts/多 train.py")
    write(
        directory, "raise ImportError('the working directory is not the place of the standard library')", "secrets.py"
    )
    words = [*PYTHON, "-O", "-X", "dev", "scripts/多 train.py", *ARGUMENTS]
    forged = json.dumps({"worker": 1, "supervisor": 1, "link": 0, "plan": "{}"})
    ended = Run(directory, words, env={"DUOKA_WORKER": forged}).finish()
    assert ended.code == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def by_command(tmp_path_factory):
    ended = run(tmp_path_factory.mktemp("command"), FACTS, *ARGUMENTS, program=[*DUOKA_RUN, "--devices", "2"])
    assert ended.code == 0, ended.err
    return ended


@pytest.fixture(params=["plain", "by_command"])
def either(request):
    return request.getfixturevalue(request.param)


def test_both_ways_of_starting_give_two_workers_that_can_add(either):
    facts = either.facts()
    assert {worker: fact["worker"] for worker, fact in facts.items()} == {0: 0, 1: 1}
    assert [fact["sum"] for fact in facts.values()] == [3.0, 3.0]
    assert [facts[worker]["device"] for worker in (0, 1)] == ["cpu:0/v0", "cpu:0/v1"]
    assert all(fact["leads_its_group"] for fact in facts.values())


def test_a_worker_runs_the_script_as_python_would(plain):
    script = plain.directory / "scripts" / "多 train.py"
    for fact in plain.facts().values():
        assert fact["argv"] == [str(script), *ARGUMENTS]
        assert fact["file"] == str(script)
        assert fact["name"] == "__main__"
        assert fact["first_path"] == str(script.parent)


def test_a_script_that_went_elsewhere_first_starts_where_it_was_started(either):
    assert {fact["cwd"] for fact in either.facts().values()} == {str(either.directory)}
    assert (either.directory / "runs").is_dir()


def test_workers_keep_the_flags_of_the_interpreter(plain):
    assert [fact["flags"][:2] for fact in plain.facts().values()] == [[1, True]] * 2


def test_workers_start_with_equal_hashes_and_equal_random_numbers(either):
    first, second = either.facts().values()
    assert first["set_order"] == second["set_order"]
    assert first["random"] == second["random"]
    assert first["environ"]["PYTHONHASHSEED"] == second["environ"]["PYTHONHASHSEED"] == "0"


def test_threads_are_pinned_for_every_framework_and_stated_once(either):
    for fact in either.facts().values():
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC"):
            assert fact["environ"][name] == "1"
        assert fact["environ"]["CUDA_VISIBLE_DEVICES"] == ""
    assert either.err.count("1 thread each") == 1


def test_a_python_started_by_a_worker_does_not_think_that_it_is_one(either):
    for fact in either.facts().values():
        assert fact["nested"] == ["LaunchError", "False"]
        assert fact["environ"]["DUOKA_WORKER"] is None


def test_the_supervisor_loads_no_numpy(either):
    assert [fact["supervisor_maps_numpy"] for fact in either.facts().values()] == [False, False]


def test_a_calm_run_says_two_lines_and_warns_of_nothing_even_in_development_mode(plain):
    assert [line.split(":")[0] for line in plain.err.splitlines()] == ["duoka", "duoka"], plain.err


MODULE = """
import json, sys
import duoka
strategy = duoka.Mirrored(devices=2)
total = float(strategy.sum(1.0))
print(json.dumps({"spec": __spec__.name, "package": __package__, "argv": sys.argv[1:], "sum": total}))
"""


@pytest.mark.parametrize(
    "program", [PYTHON, DUOKA_RUN, (*DUOKA_RUN, "--devices", "2")], ids=["python", "run", "devices"]
)
def test_a_module_runs_as_one(tmp_path, program):
    write(tmp_path, "", "package/__init__.py")
    write(tmp_path, MODULE, "package/train.py")
    ended = Run(tmp_path, [*program, "-m", "package.train", "-m", "a b"]).finish()
    assert ended.code == 0, ended.err
    expected = {"spec": "package.train", "package": "package", "argv": ["-m", "a b"], "sum": 2.0}
    assert ended.facts() == {0: expected, 1: expected}


def test_one_replica_runs_in_place_and_four_on_one_worker_under_a_supervisor(tmp_path):
    source = """
        import os, sys
        import duoka
        strategy = duoka.Mirrored(devices=1, replicas=int(sys.argv[1]))
        assert float(strategy.sum_over_replicas(lambda replica: 1.0)) == strategy.replicas
        print(os.getpid(), os.getppid(), strategy.num_workers)
        """
    alone = start(tmp_path, source, "1")
    assert alone.finish().out.split()[0] == str(alone.process.pid)
    assert not (alone.directory / "runs").exists()
    supervised = start(tmp_path, source, "4")
    assert supervised.finish().out.split()[1:] == [str(supervised.process.pid), "1"]


def test_a_card_that_is_not_here_is_replaced_in_place_and_it_says_so(tmp_path):
    ended = run(tmp_path, "import duoka\nprint(duoka.Mirrored(devices='gpu:31').device)")
    assert (ended.code, ended.out) == (0, "cpu:0/v0\n")
    assert ended.err == "duoka: gpu:31 is not here: cpu:0/v0, a virtual CPU device, takes its place\n"


def test_a_fake_card_is_seen_by_its_own_worker_only_and_the_script_still_sees_all(tmp_path):
    """Two cards, made up below NVML: the run is planned on both, then each worker is shown one."""
    write(
        tmp_path,
        """
        import pathlib, sys, types
        nvml = types.ModuleType("pynvml")
        nvml.NVMLError = type("NVMLError", (Exception,), {})
        def refuse(*_): raise nvml.NVMLError("not supported")
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMigMode"):
            setattr(nvml, name, refuse)
        nvml.__getattr__ = lambda name: refuse
        nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
        nvml.nvmlDeviceGetCount = lambda: 2
        nvml.nvmlDeviceGetHandleByIndex = lambda number: number
        nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}0000000"
        nvml.nvmlDeviceGetName = lambda handle: "Fake"
        nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=2**33, free=2**33, used=0)
        sys.modules["pynvml"] = nvml
        import duoka.devices.cuda
        duoka.devices.cuda.DRIVER_FILES = (pathlib.Path("/"),)
        """,
        "fakes/sitecustomize.py",
    )
    source = """
        import json, os
        import duoka
        strategy = duoka.Mirrored()
        print(json.dumps({
            "mine": strategy.device.name,
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "all": [device.name for device in duoka.devices()],
            "sum": float(strategy.sum(1.0)),
        }))
        """
    ended = run(tmp_path, source, env={"PYTHONPATH": str(tmp_path / "work" / "fakes")})
    assert ended.code == 0, ended.err
    assert ended.facts() == {
        number: {
            "mine": f"gpu:{number}",
            "visible": f"GPU-{number}0000000",
            "all": ["gpu:0", "gpu:1", "cpu:0"],
            "sum": 2.0,
        }
        for number in (0, 1)
    }


REFUSED = """
import json, sys
import duoka
import numpy
told = {}
for text in sys.argv[1:]:
    try:
        eval(f"duoka.Mirrored({text})")
    except duoka.DuokaError as error:
        told[text] = [type(error).__name__, str(error)]
print(json.dumps(told))
"""
REFUSALS = {
    "2, replicas=1": ("TopologyError", "2 workers"),
    "replicas=0": ("TopologyError", "0 replicas"),
    "2, replicas=-1": ("LaunchError", "replicas=-1"),
    "2, replicas=2.0": ("LaunchError", "replicas=2.0"),
    "2, replicas='4'": ("LaunchError", "replicas='4'"),
    "devices=0": ("DeviceError", "devices=0"),
    "devices=-3": ("DeviceError", "devices=-3"),
    "devices=[]": ("DeviceError", "names no device"),
    "devices='warp:0'": ("DeviceError", "warp:0"),
    "devices='gpu:x'": ("DeviceError", "'gpu:x'"),
    "devices=['cpu:0', 'cpu']": ("DeviceError", "2 times"),
    "devices=100_000": ("DeviceError", "devices=100000"),
    "2, seed='x'": ("LaunchError", "seed='x'"),
    "2, seed=-1": ("LaunchError", "seed=-1"),
    "2, threads=0": ("LaunchError", "threads=0"),
    "2, deadline_s=0": ("LaunchError", "deadline_s=0"),
    "2, deadline_s=float('nan')": ("LaunchError", "deadline_s=nan"),
    "devices=2, soft_placement=False": ("DeviceError", "soft_placement=False"),
}


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path):
    ended = run(tmp_path, REFUSED, *REFUSALS)
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    for text, (kind, part) in REFUSALS.items():
        assert told[text][0] == kind, told[text]
        assert part in told[text][1]
        assert "\n  why  " in told[text][1] or "\n  do   " in told[text][1]
    assert not (ended.directory / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--devices", "2", "--replicas", "1", "script.py"], 1, "TopologyError: 1 replica"),
        (["--devices", "1", "--replicas", "0", "script.py"], 1, "TopologyError: 0 replicas"),
        (["--replicas", "2", "script.py"], 1, "LaunchError: --replicas was passed without --devices"),
        (["--no-respawn", "script.py"], 1, "LaunchError: --no-respawn was passed without --devices"),
        (["--devices", "0", "script.py"], 69, "DeviceError: devices=0"),
        (["--devices", "warp:0,cpu:0", "script.py"], 69, "warp:0"),
        (["--devices", "cpu:0,cpu:0", "script.py"], 69, "DeviceError: cpu:0 is named 2 times"),
        (["--devices", "2", "missing.py"], 1, "LaunchError: There is no script missing.py"),
        (["missing.py"], 1, "did you mean script.py?"),
        ([], 1, "LaunchError: There is nothing to run"),
    ],
)
def test_the_command_refuses_in_one_message_with_a_fitting_code(tmp_path, words, code, part):
    write(tmp_path, "raise SystemExit('this must not run')")
    ended = Run(tmp_path, [*DUOKA_RUN, *words]).finish()
    assert ended.code == code
    assert part in ended.err
    assert ended.err.startswith("duoka: ") and ended.err.count("Error: ") == 1
    assert "Traceback" not in ended.err and ended.out == ""


def test_numpy_integers_and_an_endless_deadline_are_welcome(tmp_path):
    source = """
        import math
        import numpy
        import duoka
        two, four, seven = numpy.int64(2), numpy.int32(4), numpy.uint8(7)
        strategy = duoka.Mirrored(devices=two, replicas=four, seed=seven, deadline_s=math.inf)
        print(strategy.sum_over_replicas(lambda replica: float(replica)))
        """
    ended = run(tmp_path, source)
    assert (ended.code, ended.out) == (0, "6.0\n"), ended.err


def test_another_launchers_copies_are_told_how_to_start(tmp_path):
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for program in (PYTHON, (*DUOKA_RUN, "--devices", "2")):
        ended = run(tmp_path, "import duoka\nduoka.Mirrored(devices=2)", program=program, env=environ)
        assert ended.code == 1
        assert "LaunchError: torchrun has already started several copies" in ended.err
        assert "  do   start it as `python script.py` or `duoka run script.py`." in ended.err
        assert not (ended.directory / "runs").exists()


def test_a_second_strategy_that_asks_for_another_run_is_an_error_that_names_both(tmp_path):
    source = """
        import duoka
        strategy = duoka.Mirrored(devices=2)
        duoka.Mirrored(devices=2, seed=strategy.worker + 1)
        """
    ended = run(tmp_path, source)
    assert ended.code == 1
    assert "LaunchError: This run is 2 replicas on 2 workers (cpu:0/v0, cpu:0/v1), 1 thread each, seed 0;" in ended.err


def test_lines_of_other_workers_are_prefixed_and_folded_when_equal(tmp_path):
    source = """
        import sys
        import duoka
        strategy = duoka.Mirrored(devices=3)
        strategy.barrier()
        print("everybody says this")
        print("everybody warns", file=sys.stderr)
        if strategy.worker:
            print("not the first")
        if strategy.worker == 2:
            print("only the last")
        """
    ended = run(tmp_path, source)
    assert sorted(ended.out.splitlines()) == sorted(
        ["everybody says this", "[w1-2] not the first", "[w2] only the last"]
    )
    assert [line for line in ended.err.splitlines() if not line.startswith("duoka")] == ["everybody warns"]
    assert sorted(ended.log(1).splitlines()) == ["everybody says this", "everybody warns", "not the first"]


@pytest.mark.slow
def test_fifty_megabytes_pass_unchanged_and_quickly(tmp_path):
    source = """
        import sys
        import duoka
        strategy = duoka.Mirrored(devices=2)
        if strategy.is_main:
            for number in range(50):
                sys.stdout.write(f"{number:06} ".ljust(1023, "x").ljust(1024, chr(10)) * 1024)
        """
    ended = run(tmp_path, source)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert len(ended.out) == 50 * 2**20 and len(lines) == 50 * 1024
    assert [line[:6] for line in lines[::1024]] == [f"{number:06}" for number in range(50)]
    assert ended.log(0) == ended.out


def test_equal_output_of_workers_that_are_not_in_step_stays_folded(tmp_path):
    source = """
        import duoka
        strategy = duoka.Mirrored(devices=2)
        strategy.barrier()
        for number in range(900):
            print("line", number)
        """
    ended = run(tmp_path, source)
    assert ended.code == 0
    assert ended.out.splitlines() == [f"line {number}" for number in range(900)]


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path):
    source = """
        import duoka
        strategy = duoka.Mirrored(devices=2)
        for step in range(300):
            strategy.print("step", step, "x" * 1000)
            strategy.barrier()
        open("finished", "w").close()
        """
    going = start(tmp_path, source, stdout=subprocess.PIPE)
    assert going.process.stdout.readline().startswith(b"step 0 ")
    going.process.stdout.close()
    assert going.process.wait(START_S) == 0
    (going.directory / "finished").unlink()
    ended = going.finish()
    assert ended.log(0).splitlines()[-1].startswith("step 299 ")
    assert "Broken" not in ended.err and "Traceback" not in ended.err


def test_without_a_place_for_runs_the_logs_go_to_a_temporary_directory_and_it_says_so(tmp_path):
    write(tmp_path, "in the way", "runs")
    (tmp_path / "temporary").mkdir()
    source = "import duoka\nprint('hello', duoka.Mirrored(devices=2).num_workers)"
    ended = run(tmp_path, source, env={"TMPDIR": str(tmp_path / "temporary")})
    assert (ended.code, ended.out) == (0, "hello 2\n")
    (note,) = [line for line in ended.said() if "cannot be written" in line]
    (place,) = [word for word in note.split() if "/duoka-" in word]
    assert Path(place.rstrip("."), "worker-1.log").read_text() == "hello 2\n"


def test_two_runs_at_once_in_one_directory_never_meet(tmp_path):
    source = """
        import sys, time
        import duoka
        strategy = duoka.Mirrored(devices=2)
        for step in range(20):
            total = float(strategy.sum(float(sys.argv[1])))
            time.sleep(0.01)
        print(total)
        """
    write(tmp_path, source)
    runs = [Run(tmp_path, [*PYTHON, "script.py", text]) for text in ("1", "10", "100")]
    assert [going.process.wait(START_S) for going in runs] == [0, 0, 0]
    assert [going.finish().out for going in runs] == ["2.0\n", "20.0\n", "200.0\n"]
    logs = [(path / "worker-0.log").read_text() for path in (tmp_path / "work" / "runs").iterdir()]
    assert sorted(logs) == ["2.0\n", "20.0\n", "200.0\n"]


@pytest.mark.slow
def test_sixty_four_workers_on_two_cores_agree(tmp_path):
    source = """
        import duoka
        strategy = duoka.Mirrored(devices=64)
        assert float(strategy.sum(float(strategy.worker))) == 2016.0
        result = strategy.sum_over_replicas(lambda replica: [1.0, 2.0 ** replica])
        print([float(part) for part in result])
        """
    ended = run(tmp_path, source, timeout_s=START_S)
    assert ended.code == 0, ended.err
    assert ended.out == f"[64.0, {float(2**64 - 1)}]\n"
    assert "64 workers (cpu:0/v0 ... cpu:0/v63)" in ended.err
    assert len(list(ended.run_directory.iterdir())) == 64


def test_more_workers_than_the_system_can_start_is_one_clear_error(tmp_path):
    source = "import duoka\nprint(duoka.Mirrored(devices=64).worker)"
    ended = run(tmp_path, source, program=["bash", "-c", 'ulimit -n 120; exec "$@"', "bash", *PYTHON])
    assert ended.code == 1
    (line,) = ended.said()
    assert line.startswith("LaunchError: 64 workers cannot be started")
    assert "Too many open files" in ended.err and "Traceback" not in ended.err


@pytest.mark.slow
@pytest.mark.torch
def test_torch_draws_equal_numbers_on_all_workers_from_the_moment_it_is_imported(tmp_path):
    source = """
        import json
        import duoka
        strategy = duoka.Mirrored(devices=2, seed=3)
        import torch
        weights = torch.nn.Linear(4, 4).weight
        loader = torch.utils.data.DataLoader(range(8), batch_size=2, num_workers=2, shuffle=True)
        print(json.dumps({
            "weights": weights.tolist(),
            "is_seeded": torch.initial_seed() == 3,
            "threads": torch.get_num_threads(),
            "shuffled": [batch.tolist() for batch in loader],
            "gathered": len({part.numpy().tobytes() for part in strategy.gather(weights)}),
        }))
        """
    ended = run(tmp_path, source, timeout_s=START_S)
    assert ended.code == 0, ended.err
    first, second = ended.facts().values()
    assert first == second
    assert (first["is_seeded"], first["threads"], first["gathered"]) == (True, 1, 1)


def test_a_script_that_wants_no_replacements_has_none_under_duoka_run(tmp_path):
    source = """
    import os, signal
    import numpy as np
    import duoka

    strategy = duoka.Mirrored(respawn=False)
    for step in range(6):
        if step == 2 and strategy.worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.sum_over_replicas(lambda replica: np.ones(2))
    """
    ended = start(tmp_path, source, program=(*DUOKA_RUN, "--devices", "2")).finish(START_S)
    assert ended.code == 0, ended.err
    assert "worker 1 (cpu:0/v1) is not started again: the script says respawn=False." in ended.said()


def test_a_call_under_is_main_is_named_with_its_line_and_both_sides(tmp_path):
    source = """
    import numpy as np
    import duoka

    strategy = duoka.Mirrored(devices=2)
    strategy.sum_over_replicas(lambda replica: np.ones(2))
    if strategy.is_main:
        strategy.barrier()
    strategy.sum_over_replicas(lambda replica: np.ones(2))
    """
    ended = start(tmp_path, source).finish(START_S)
    assert ended.code == 1, ended.err
    assert "worker 0 (cpu:0/v0): barrier at script.py:8" in ended.err
    assert "worker 1 (cpu:0/v1): exchange 2 over replicas" in ended.err
    assert "The main worker alone made its call at script.py:8" in ended.err and "`if strategy.is_main:`" in ended.err
