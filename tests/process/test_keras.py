"""Keras trainings on real workers: the numbers of plain `fit`, and bits that do not depend on the number of workers."""

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

HERE = Path(__file__).parent
SCRIPT = HERE / "keras_scenarios.py"
BACKENDS = [
    pytest.param("tensorflow", marks=[pytest.mark.tensorflow]),
    pytest.param("jax", marks=[pytest.mark.jax, pytest.mark.slow]),
    pytest.param("torch", marks=[pytest.mark.torch, pytest.mark.slow]),
]
# How near to one device: with one more rounding per replica nothing is equal in bits.
NUMBERS = {
    "sgd_briefly": 1e-5,
    "sgd": 1e-5,
    "adamw": 1e-3,  # these blow up rounding where gradients are near zero
    "nadam": 1e-3,
    "added_losses": 1e-5,
    "weights_now_and_then": 1e-5,
    "positions": 1e-5,
    "positions_run_eagerly": 1e-5,
    "positions_of_several_lengths": 1e-5,
    "no_reduction": 1e-5,
    "one_number_for_a_batch": 1e-5,
    "mixed_precision": 2e-3,  # rows are added up in another order, in 16 bits
    "accumulated": 1e-5,
    "eager": 1e-5,
    "last_batch_of_one": 1e-5,
    "own_train_step": 1e-5,
    "frozen_layers": 1e-5,
    "moody_callbacks": 1e-5,
    "masked_beside_unmasked": 1e-5,
    "sum_reduction": 1e-5,
    "batches_from_a_dataset": 1e-5,
}


# What `make test` has time for; `make test-full` runs all. Only PyTorch compiles nothing.
FEW = ("sgd_briefly", "a_death")
SOME = {
    "tensorflow": (*FEW, "everything_at_once"),
    "jax": FEW,
    "torch": (
        *FEW,
        "everything_at_once",
        "odd_state",
        "last_batch_of_one",
        "one_number_for_a_batch",
        "a_metric_that_counts_batches",
    ),
}


@lru_cache
def run(backend: str, num_workers: int, num_replicas: int, names: tuple[str, ...], *more: str) -> tuple[dict, str]:
    """What the script prints, and what else is said."""
    words = ["--devices", str(num_workers), "--replicas", str(num_replicas), str(SCRIPT), *names, *more]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-m", "duoka", "run", *words],
            capture_output=True,
            text=True,
            timeout=590,
            cwd=directory,
            env=os.environ | one_thread | {"KERAS_BACKEND": backend},
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("SIGKILL" in done.stderr) == ("--struck" in more), "a death must happen where it is planned"
    return read_result(done.stdout), done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_and_history_do_not_depend_on_the_number_of_workers_even_when_one_is_killed(backend):
    """Two workers at first, one from the middle of the scenario with a death on."""
    names = SOME[backend]
    (one, _), (two, _) = at_once(
        lambda: run(backend, 1, 4, names, "--plain"), lambda: run(backend, 2, 4, names, "--struck")
    )
    compare_bits(one, two)


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_train_to_the_numbers_of_plain_fit(backend):
    compare_numbers(run(backend, 1, 4, SOME[backend], "--plain")[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_bits_and_history_on_other_numbers_of_workers(backend, num_workers):
    compare_bits(run(backend, 1, 4, (), "--plain")[0], run(backend, num_workers, 4, ())[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_other_numbers_of_replicas_train_to_the_numbers_of_plain_fit(backend, num_replicas):
    compare_numbers(run(backend, 1, num_replicas, (), "--plain")[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_metric_that_is_no_sum_is_named_and_others_are_right(backend):
    results, said = run(backend, 1, 4, (), "--plain")
    assert "largest is not a sum" in said
    assert "accuracy is not a sum" not in said and "loss is not a sum" not in said
    plain, ours = (results[kind]["a_metric_that_is_no_sum"]["history"] for kind in ("plain", "ours"))
    name = "sparse_top_k_categorical_accuracy"
    assert ours[name] == pytest.approx(plain[name])


@pytest.mark.torch
def test_a_loss_that_gives_one_number_for_a_batch_is_named_once():
    said = run("torch", 1, 4, SOME["torch"], "--plain")[1]
    assert said.count("the loss mean_of_all gives one number for a batch") == 1


@pytest.mark.torch
def test_state_of_a_kind_that_is_not_known_is_named_once():
    said = run("torch", 1, 4, SOME["torch"], "--plain")[1]
    assert said.count("merged to a mean, weighted by rows, as for BatchNorm") == 1
    assert said.count("replica 0's") == 1, said


def check_metrics_of_batches(backend: str, names: tuple[str, ...]) -> None:
    results, said = run(backend, 1, 4, names, "--plain")
    named = [line for line in said.splitlines() if "counts batches rather than rows" in line]
    assert [line.split()[1] for line in named] == ["batches_seen"]
    plain, ours = (results[kind]["a_metric_that_counts_batches"]["history"] for kind in ("plain", "ours"))
    assert ours["rows_seen"] == plain["rows_seen"] == [23.0, 23.0]
    assert plain["batches_seen"] != ours["batches_seen"], "else there is nothing to be named"


@pytest.mark.torch
def test_a_metric_that_counts_batches_is_named_and_one_that_counts_rows_is_not():
    check_metrics_of_batches("torch", SOME["torch"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_metric_that_counts_batches_is_named_on_every_backend(backend):
    check_metrics_of_batches(backend, ())


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_have_bits_of_their_own(backend):
    """Else the tests above would compare nothing."""
    results = run(backend, 1, 4, SOME[backend], "--plain")[0]
    assert results["plain"]["sgd_briefly"]["sha256"] != results["ours"]["sgd_briefly"]["sha256"]


def compare_bits(alone, together):
    alone, together = alone["ours"], together["ours"]
    assert alone.keys() == together.keys()
    for name in alone:
        assert together[name]["history"] == alone[name]["history"], name
        assert together[name]["sha256"] == alone[name]["sha256"], name


def compare_numbers(results):
    plain, ours = results["plain"], results["ours"]
    for name in [name for name in NUMBERS if name in plain]:
        for part in ("weights", "history"):
            expected, found = list(plain[name][part].values()), list(ours[name][part].values())
            assert len(expected) == len(found), name
            for key, a, b in zip(plain[name][part], found, expected, strict=True):
                difference = _largest(a, b)
                assert difference <= NUMBERS[name], f"{name}: {key} differs by {difference:.1e}"


def _largest(ours, expected) -> float:
    """max|a - b| / max|b| of a tensor as nested lists."""
    a, b = np.array(ours), np.array(expected)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12))
