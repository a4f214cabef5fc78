"""TensorFlow loops on real workers: the numbers of one device, and bits that do not depend on the number of workers."""

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

pytestmark = [pytest.mark.tensorflow]
SCRIPT = Path(__file__).with_name("tensorflow_loops.py")
# BatchNorm and dropout see the rows of a replica: nothing to compare with one device.
NOISY = ("everything_at_once", "everything_eagerly", "a_death")
NUMBERS = (
    "two_hundred_steps",
    "losses_of_all_kinds",
    "weights_of_rows",
    "an_optimizer_of_v1",
    "an_optimizer_that_xla_cannot_compile",
    "optimizers_that_xla_would_change",
    "functions_that_run_eagerly",
    "learning_rates_that_a_step_moves",
    "a_batch_of_one",
    "variables_of_ones_own",
    "a_generator_in_a_function",
    "results_of_all_kinds",
    "text_beside_numbers",
    "a_plain_batch_and_a_function_of_tensorflow",
    "a_loop_inside_the_graph",
    "two_runs_in_one_graph",
    "models_of_many_shapes",
    "two_optimizers",
    "names_of_tf_distribute",
)
ALL = (*NOISY, *NUMBERS)
# What `make test` has time for; `make test-full` runs all.
SOME = (
    "everything_at_once",
    "a_batch_of_one",
    "variables_of_ones_own",
    "a_plain_batch_and_a_function_of_tensorflow",
    "a_death",
)


@lru_cache
def run(num_workers: int, num_replicas: int, *words: str) -> tuple[dict, str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    with tempfile.TemporaryDirectory() as directory:
        words = ["--devices", str(num_workers), "--replicas", str(num_replicas), str(SCRIPT), *words]
        done = subprocess.run(
            [sys.executable, "-m", "duoka", "run", *words],
            capture_output=True,
            text=True,
            timeout=590,
            cwd=directory,
            env=os.environ | one_thread,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("SIGKILL" in done.stderr) == ("--struck" in words), "a death must happen where it is planned"
    return read_result(done.stdout), done.stderr


def test_bits_do_not_depend_on_the_number_of_workers_even_when_one_is_killed():
    (one, _), (two, _) = at_once(lambda: run(1, 4, *SOME, "--plain"), lambda: run(2, 4, *SOME, "--struck"))
    compare_bits(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_bits_on_other_numbers_of_workers(num_workers):
    compare_bits(run(1, 4, *ALL, "--plain")[0], run(num_workers, 4, *ALL)[0])


def test_replicas_train_to_the_numbers_of_one_device():
    compare_numbers(run(1, 4, *SOME, "--plain")[0])


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_other_numbers_of_replicas_train_to_the_numbers_of_one_device(num_replicas):
    results = run(1, num_replicas, *NUMBERS, "--plain")[0]
    compare_numbers(results)
    assert results["step"] == run(1, 4, *NUMBERS, "--plain")[0]["step"] > 200, "steps are counted with one replica, too"


def test_replicas_have_bits_of_their_own():
    """Else the tests above would compare nothing."""
    results = run(1, 4, *SOME, "--plain")[0]
    assert results["plain"]["variables_of_ones_own"]["sha256"] != results["ours"]["variables_of_ones_own"]["sha256"]


def test_variables_are_merged_as_their_aggregation_says():
    results = run(1, 4, *SOME, "--plain")[0]["ours"]["variables_of_ones_own"]
    assert (results["seen"], results["steps"], results["first"]) == (95, 8, 8)


def test_weights_that_no_optimizer_writes_to_are_named():
    assert "without an optimizer that could be seen" in run(1, 4, *SOME, "--plain")[1]


def test_a_plain_batch_is_split_and_said_once():
    said = run(1, 4, *SOME, "--plain")[1]
    assert said.count("was given a plain batch: it is split") == 1


def test_batches_with_fewer_rows_than_replicas_are_named_once_and_trained_on():
    said = run(1, 4, *SOME, "--plain")[1]
    assert said.count("batches of 3 rows are split between 4 replicas: 1 has no rows") == 1
    assert said.count("no rows and only wait") == 1, "not those that are the last of a pass"


@pytest.mark.slow
def test_steps_that_exchange_in_their_middle_train_to_the_numbers_of_one_device():
    results, said = run(2, 2, "in_turns", "synchronized", "--one-each", "--plain")
    compare_numbers(results)
    assert "exchanges at each update, because it uses weights after" in said or "because it calls all_reduce" in said


def compare_bits(alone, together):
    alone, together = alone["ours"], together["ours"]
    assert alone.keys() == together.keys()
    for name in alone:
        assert together[name]["numbers"] == alone[name]["numbers"], name
        assert together[name]["sha256"] == alone[name]["sha256"], name


def compare_numbers(results):
    plain, ours = results["plain"], results["ours"]
    for name in [name for name in plain if name not in NOISY]:
        pairs = zip(
            [*plain[name]["weights"], plain[name]["numbers"]],
            [*ours[name]["weights"], ours[name]["numbers"]],
            strict=True,
        )
        for expected, found in pairs:
            expected, found = np.array(expected), np.array(found)
            assert np.abs(found - expected).max() <= 1e-5 * max(np.abs(expected).max(), 1e-6), name
