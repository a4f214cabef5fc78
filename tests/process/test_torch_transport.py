"""PyTorch trainings whose sums torch.distributed carries: the bits of shared memory, also after a loss."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.limits import START_S
from tests.process.results import read_result
from tests.process.scripts import DUOKA_RUN, Ended, start

pytestmark = [pytest.mark.torch]
SCENARIOS = str(Path(__file__).parent)
BY_TORCH = {"DUOKA_TRANSPORT": "torch"}
_OF_PYTORCH = ["torchinductor_", "pymp-"]  # PyTorch makes one when it is imported, its loader workers the others
FIRST_LINE = "PyTorch by torch.distributed (Gloo); logs in"

TRAIN = f"""
    import json, sys
    sys.path.insert(0, {SCENARIOS!r})
    import duoka
    from results import print_result
    from torch_scenarios import SCENARIOS, describe

    exact = json.loads(sys.argv[1])
    results = {{}}
    for name in sys.argv[2:]:
        strategy = duoka.Mirrored(devices=2, exact=exact)
        results[name] = describe(*SCENARIOS[name](strategy))
    print_result(results)
"""

TRAIN_AND_DIE = f"""
    import json, os, signal, sys
    sys.path.insert(0, {SCENARIOS!r})
    import duoka
    from results import print_result
    from torch_scenarios import SCENARIOS, describe

    strategy = duoka.Mirrored(
        devices=3, replicas=4, exact=True, log_placement=True, deadline_s=20, respawn=False
    )
    control = strategy._session.collective

    def maybe_die(moment):
        if moment == sys.argv[1] and strategy.worker == 1 and strategy.step == 5:
            print("about to die", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    control.moment = maybe_die
    print_result({{"sgd": describe(*SCENARIOS["sgd"](strategy))}})
"""


def run(directory: Path, source: str, *words: str, timeout_s: float = START_S, **options: Any) -> Ended:
    return start(directory, source, *words, **options).finish(timeout_s, leaves=_OF_PYTORCH)


def results_of(ended: Ended) -> dict:
    assert ended.code == 0, ended.err
    return read_result(ended.out)


def train(directory: Path, num_workers: int, exact: bool | None, *names: str, env: dict[str, str]) -> Ended:
    words = [*DUOKA_RUN, "--devices", str(num_workers), "--replicas", "4"]
    return run(directory, TRAIN, json.dumps(exact), *names, program=words, env=env, timeout_s=START_S)


NAMES = ["sgd", "everything_at_once", "bfloat16_parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 3])
def test_exact_sums_by_gloo_train_to_the_bits_of_shared_memory(tmp_path, num_workers):
    shared = train(tmp_path / "shm", 1, True, *NAMES, env={})
    carried = train(tmp_path / "torch", num_workers, True, *NAMES, env=BY_TORCH)
    assert "torch.distributed" not in shared.err and FIRST_LINE in carried.err
    expected, found = results_of(shared), results_of(carried)
    assert {name: found[name]["sha256"] for name in NAMES} == {name: expected[name]["sha256"] for name in NAMES}


@pytest.mark.slow
def test_without_exact_the_librarys_own_sums_are_taken(tmp_path):
    """Near to those of shared memory, and not the same: else nothing says whose sums they were."""
    shared = results_of(train(tmp_path / "shm", 1, None, "sgd", env={}))["sgd"]
    carried = results_of(train(tmp_path / "torch", 3, None, "sgd", env=BY_TORCH))["sgd"]
    assert carried["sha256"] != shared["sha256"]
    for name, weights in shared["weights"].items():
        assert largest_difference(carried["weights"][name], weights) < 1e-5


def largest_difference(found, expected) -> float:
    import numpy as np

    return float(np.abs(np.array(found) - np.array(expected)).max() / np.abs(np.array(expected)).max())


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Ended:
    return run(tmp_path_factory.mktemp("calm"), TRAIN_AND_DIE, "never", env={})


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["depositing", "sent", "gathering"])
def test_a_training_that_loses_a_worker_ends_with_the_bits_of_a_calm_one(tmp_path, calm, moment):
    struck = run(tmp_path / "struck", TRAIN_AND_DIE, moment, env=BY_TORCH)
    assert "about to die" in struck.log(1)
    assert results_of(struck)["sgd"]["sha256"] == results_of(calm)["sgd"]["sha256"]
    # Where each replica runs is said at the start, and when they have been dealt anew.
    said = [line for line in struck.said() if line.startswith("replica ")]
    assert said[:4] == [
        "replica 0 -> worker 0 -> cpu:0/v0",
        "replica 1 -> worker 0 -> cpu:0/v0",
        "replica 2 -> worker 1 -> cpu:0/v1",
        "replica 3 -> worker 2 -> cpu:0/v2",
    ]
    assert said[4:] == [
        "replica 0 -> worker 0 -> cpu:0/v0",
        "replica 1 -> worker 0 -> cpu:0/v0",
        "replica 2 -> worker 2 -> cpu:0/v2",
        "replica 3 -> worker 2 -> cpu:0/v2",
    ]


@pytest.mark.slow
def test_a_worker_that_fails_in_its_own_code_ends_the_run_at_once(tmp_path):
    """The others wait for it in the meeting; nobody is held up by connections that are open."""
    script = f"""
        import sys
        sys.path.insert(0, {SCENARIOS!r})
        import duoka
        from torch_scenarios import sgd

        strategy = duoka.Mirrored(devices=2)

        def fail():
            if strategy.step == 3 and strategy.worker == 1:
                raise ValueError("my own mistake")

        sgd(strategy, happen=fail)
    """
    ended = run(tmp_path, script, env=BY_TORCH)
    assert ended.code == 1 and "ValueError: my own mistake" in ended.err


@pytest.mark.slow
def test_loader_workers_that_outlive_their_dead_parent_hold_nobody_up(tmp_path):
    """They have copies of its sockets, so no connection is closed: the supervisor's word must do."""
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {SCENARIOS!r})
        import duoka
        from torch_scenarios import sgd

        strategy = duoka.Mirrored(devices=2, exact=True, deadline_s=1000, respawn=False)

        def die():
            if strategy.step == 13 and strategy.worker == 1:
                control = strategy._session.collective
                control.moment = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == "sent" else None

        sgd(strategy, happen=die, num_workers=1)
        print("steps", strategy.step)
    """
    ended = run(tmp_path, script, env=BY_TORCH)
    assert ended.code == 0, ended.err
    assert "steps 22" in ended.out and any("worker 1" in line for line in ended.said())


@pytest.mark.slow
def test_arrays_are_added_up_in_the_memory_of_the_host(tmp_path):
    script = """
        import numpy as np, duoka
        strategy = duoka.Mirrored(devices=2)
        print(strategy.sum_over_replicas(lambda replica: np.ones(3) * replica), strategy.sum(2.0))
    """
    ended = run(tmp_path, script, env=BY_TORCH)
    assert ended.code == 0 and ended.out.strip() == "[1. 1. 1.] 4.0"


@pytest.mark.slow
def test_a_notebooks_workers_use_the_library_too(tmp_path):
    script = f"""
        import sys
        sys.path.insert(0, {SCENARIOS!r})
        import torch, duoka
        from torch_scenarios import SCENARIOS, describe

        def train(exact):
            return describe(*SCENARIOS["sgd"](strategy))["sha256"]

        import duoka.session
        duoka.session.from_process = lambda *_: None  # as in a notebook: no script to start again
        strategy = duoka.Mirrored(devices=2, exact=True, log_placement=True)
        print(strategy.launch(train, True))
    """
    alone = run(tmp_path / "shm", script, env={})
    carried = run(tmp_path / "torch", script, env=BY_TORCH)
    assert alone.code == carried.code == 0, carried.err
    assert "torch.distributed (Gloo)" in carried.err and "replica 1 -> worker 1 -> cpu:0/v1" in carried.err
    assert alone.out == carried.out and len(carried.out.strip()) == 64


@pytest.mark.slow
def test_exact_switches_deterministic_kernels_on(tmp_path):
    script = """
        import torch, duoka
        for exact in (None, False, True):
            duoka.Mirrored(devices=1, exact=exact).prepare(torch.nn.Linear(2, 2))
            print(exact, torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic)
    """
    ended = run(tmp_path, script)
    assert ended.out.splitlines() == ["None False False", "False False False", "True True True"]


def test_unknown_transports_and_answers_are_refused(tmp_path):
    script = "import sys, duoka; duoka.Mirrored(devices=2, **eval(sys.argv[1]))"
    ended = run(tmp_path, script, "{}", env={"DUOKA_TRANSPORT": "carrier-pigeon"})
    assert ended.code == 1 and "LaunchError: DUOKA_TRANSPORT=carrier-pigeon cannot be used." in ended.err
    for words, told in [
        ("{'exact': 'no'}", "exact='no' cannot be used.\n  why  it must be True, False or None."),
        ("{'sync_batchnorm': None}", "sync_batchnorm=None cannot be used.\n  why  it must be True or False."),
        ("{'share_reading': 'yes'}", "share_reading='yes' cannot be used.\n  why  it must be True, False or None."),
        ("{'log_placement': 1}", "log_placement=1 cannot be used.\n  why  it must be True or False."),
    ]:
        ended = run(tmp_path, script, words)
        assert ended.code == 1 and told in ended.err


@pytest.mark.slow
def test_what_is_for_keras_alone_is_refused_for_a_loop(tmp_path):
    script = "import torch, duoka; duoka.Mirrored(devices=2, share_reading=True).prepare(torch.nn.Linear(2, 1))"
    ended = run(tmp_path, script)
    assert ended.code == 1 and "share_reading=True has no meaning for PyTorch loops" in ended.err


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_open_connections_at_once(tmp_path):
    script = f"""
        import sys
        sys.path.insert(0, {SCENARIOS!r})
        import duoka
        from torch_scenarios import sgd

        strategy = duoka.Mirrored(devices=2)
        sgd(strategy, epochs=100_000, happen=lambda: strategy.step == 30 and print("under way", flush=True))
    """
    going = start(tmp_path, script, env=BY_TORCH)
    going.wait_for("under way")
    going.signal(signal.SIGINT)
    ended = going.finish(START_S, leaves=_OF_PYTORCH)
    assert ended.code == 130
