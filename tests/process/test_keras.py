"""Keras trainings on real workers: the numbers of plain `fit`, and bits that do not depend on the number of workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.timeout(400)]
HERE = Path(__file__).parent
SCRIPT = HERE / "keras_scenarios.py"
BACKENDS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("tensorflow", "jax", "torch")]
# How near to one device: with one more rounding per replica nothing is equal in bits.
NUMBERS = {
    "sgd": 1e-5,
    "adamw": 1e-3,  # these blow up rounding where gradients are near zero
    "nadam": 1e-3,
    "added_losses": 1e-5,
    "no_reduction": 1e-5,
    "mixed_precision": 5e-2,  # rows are added up in another order, in 16 bits
    "eager": 1e-5,
    "last_batch_of_one": 1e-5,
    "own_train_step": 1e-5,
    "frozen_layers": 1e-5,
    "moody_callbacks": 1e-5,
    "masked_beside_unmasked": 1e-5,
    "sum_reduction": 1e-5,
    "batches_from_a_dataset": 1e-5,
}


class Results(dict):
    stderr = ""


@lru_cache
def run(backend: str, num_workers: int, num_replicas: int, *more: str) -> Results:
    words = [str(SCRIPT), *more]
    if num_replicas:
        words = ["-m", "duoka", "run", "--devices", str(num_workers), "--replicas", str(num_replicas), *words]
    else:
        words.append("--plain")
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=390,
            cwd=directory,
            env=os.environ | one_thread | {"KERAS_BACKEND": backend},
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("SIGKILL" in done.stderr) == ("--struck" in more), "a death must happen where it is planned"
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    assert len(lines) == 1, "all workers must end with the same line, which is shown once"
    results = Results(json.loads(lines[0]))
    results.stderr = done.stderr
    return results


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_and_history_do_not_depend_on_the_number_of_workers_even_when_one_is_killed(backend):
    """Three workers at first, two from the middle of the scenario with a death on."""
    compare_bits(run(backend, 1, 4), run(backend, 3, 4, "--struck"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_workers", [2, 4])
def test_bits_and_history_on_other_numbers_of_workers(backend, num_workers):
    compare_bits(run(backend, 1, 4), run(backend, num_workers, 4))


def compare_bits(alone, together):
    assert alone.keys() == together.keys()
    for name in alone:
        assert together[name]["history"] == alone[name]["history"], name
        assert together[name]["sha256"] == alone[name]["sha256"], name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_replicas", [4, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 3))])
def test_replicas_train_to_the_numbers_of_plain_fit(backend, num_replicas):
    plain, ours = run(backend, 0, 0), run(backend, 1, num_replicas)
    for name, bound in NUMBERS.items():
        for part in ("weights", "history"):
            assert plain[name][part].keys() == ours[name][part].keys(), name
            for key, expected in plain[name][part].items():
                difference = _largest(ours[name][part][key], expected)
                assert difference <= bound, f"{name}: {key} differs by {difference:.1e}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_metric_that_is_no_sum_is_named_and_others_are_right(backend):
    plain, ours = run(backend, 0, 0), run(backend, 1, 4)
    assert "largest is not a sum" in ours.stderr
    assert "accuracy is not a sum" not in ours.stderr
    name = "sparse_top_k_categorical_accuracy"
    expected = plain["a_metric_that_is_no_sum"]["history"][name]
    assert ours["a_metric_that_is_no_sum"]["history"][name] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_number_of_replicas_itself_changes_bits(backend):
    """Else the tests above would compare nothing."""
    assert run(backend, 1, 2)["sgd"]["sha256"] != run(backend, 1, 4)["sgd"]["sha256"]


def _largest(ours, expected) -> float:
    """max|a - b| / max|b| of a tensor as nested lists."""
    a, b = np.array(ours), np.array(expected)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12))
