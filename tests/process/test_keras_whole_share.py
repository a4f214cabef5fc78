"""Keras steps that exchange in their middle, on real workers: the numbers of plain `fit`, and no hang after a loss."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from tests.process.at_once import at_once
from tests.process.results import read_result

SCRIPT = Path(__file__).parent / "keras_whole_share.py"
BACKENDS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("tensorflow", "jax", "torch")]
BACKENDS_BY_SPEED = [  # PyTorch starts fastest
    pytest.param("torch", marks=pytest.mark.torch),
    *(pytest.param(name, marks=[getattr(pytest.mark, name), pytest.mark.slow]) for name in ("tensorflow", "jax")),
]
# How near to one device: max|a - b| / max|b| of each variable, moving statistics included, and of the history.
NUMBERS = {
    "average_of_weights": 1e-5,
    "average_run_eagerly": 1e-5,
    "adversaries": 1e-5,
    "applies_twice": 1e-5,
    "positions": 1e-5,
    "positions_run_eagerly": 1e-5,
    "synchronised": 1e-4,
    "synchronised_with_masks": 1e-4,
    "synchronised_layer": 1e-4,
}
# Starting and compiling is what takes long.
QUICK = (
    "adversaries",
    "applies_twice",
    "positions_run_eagerly",
    "different_rates",
    "synchronised_with_masks",
    "synchronised_layer",
    "refused_compiler",
)
MODE = "runs in whole-share mode"


@lru_cache
def launch(backend: str, num_workers: int, num_replicas: int, *more: str) -> subprocess.CompletedProcess:
    words = [str(SCRIPT), *more]
    if num_replicas:
        words = ["-m", "duoka", "run", "--devices", str(num_workers), "--replicas", str(num_replicas), *words]
    else:
        words.append("--plain")
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    with tempfile.TemporaryDirectory() as directory:
        return subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=390,
            cwd=directory,
            env=os.environ | one_thread | {"KERAS_BACKEND": backend},
        )


def run(backend: str, num_workers: int, num_replicas: int, *names: str) -> dict:
    done = launch(backend, num_workers, num_replicas, *names)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_result(done.stdout)


def check_against_plain(backend: str, num_workers: int, num_replicas: int, *names: str) -> None:
    plain, ours = at_once(lambda: run(backend, 0, 0, *names), lambda: run(backend, num_workers, num_replicas, *names))
    assert MODE in launch(backend, num_workers, num_replicas, *names).stderr
    for name in plain.keys() & NUMBERS.keys():
        for part in ("weights", "history"):
            assert plain[name][part].keys() == ours[name][part].keys(), name
            for key, expected in plain[name][part].items():
                difference = _largest(ours[name][part][key], expected)
                assert difference <= NUMBERS[name], f"{name}: {key} differs by {difference:.1e}"
    for name in plain:
        assert ours[name].get("average_off", 0) <= 1e-6, f"{name}: the average is not that of the weights"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS_BY_SPEED)
def test_steps_that_exchange_in_their_middle_train_to_the_numbers_of_plain_fit(backend):
    check_against_plain(backend, 2, 3, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_workers", "num_replicas"), [(1, 2), (2, 2), (2, 3), (3, 3)])
def test_any_number_of_workers_trains_to_the_numbers_of_plain_fit(backend, num_workers, num_replicas):
    check_against_plain(backend, num_workers, num_replicas)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_of_each_worker_are_not_those_of_one_device(backend):
    """Else the tests above would compare nothing."""
    plain, ours = run(backend, 0, 0)["own_statistics"], run(backend, 2, 3)["own_statistics"]
    assert max(_largest(ours["weights"][key], plain["weights"][key]) for key in plain["weights"]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS_BY_SPEED)
def test_another_learning_rate_on_one_worker_is_seen_behind_a_loss_scale(backend):
    result = run(backend, 2, 3, *QUICK)["different_rates"]
    assert result.get("error") == "MismatchError", "each worker trains with a rate of its own"
    assert "the learning rate is" in result["text"]


@pytest.mark.slow
@pytest.mark.tensorflow
def test_sync_batchnorm_with_the_compiler_is_refused_on_tensorflow():
    result = run("tensorflow", 2, 3, *QUICK)["refused_compiler"]
    assert result["error"] == "MismatchError"
    assert result["text"].startswith("sync_batchnorm=True does not go with jit_compile=True")


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_layer_with_synchronized_is_why_shares_are_whole():
    assert "synchronised_layer" in run("tensorflow", 2, 3, *QUICK)
    assert "has synchronized=True" in launch("tensorflow", 2, 3, *QUICK).stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_lost_in_whole_share_mode_ends_the_run_with_a_clear_error(backend):
    done = launch(backend, 2, 2, "struck")
    assert done.returncode == 137, done.stderr[-3000:]
    assert "SIGKILL" in done.stderr, "the death must happen"
    assert "duoka.errors.WorkerLost: worker 1 (cpu:0/v1) was lost in call" in done.stderr
    assert "at step 5," in done.stderr
    assert "in whole-share mode a step exchanges in its middle" in done.stderr
    assert "RESULT" not in done.stdout


def _largest(ours, expected) -> float:
    """max|a - b| / max|b| of a tensor as nested lists."""
    a, b = np.array(ours), np.array(expected)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12))
