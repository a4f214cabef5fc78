"""Datasets of tf.data that begin anew are read by one worker for all, without being asked; all else by every worker."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

from tests.process.scripts import DUOKA_RUN, Ended, Run

pytestmark = [pytest.mark.timeout(600), pytest.mark.tensorflow]
SCRIPT = Path(__file__).parent / "keras_restarting.py"
FEW = ("two_fits", "who_restarts", "reader_dies_in_a_second_fit")
# The fewest scenarios that show it; all of them, and the other backends, are part of the full matrix.
CASES = [
    pytest.param(("tensorflow", 2, *FEW)),
    pytest.param(("tensorflow", 2), marks=[pytest.mark.slow]),
    pytest.param(("torch", 2), marks=[pytest.mark.torch, pytest.mark.slow]),
    pytest.param(("jax", 2), marks=[pytest.mark.jax, pytest.mark.slow]),
]
RESTARTING = ["pictures", "folder", "slices", "records", "interleaved"]
SHARED = {"two_fits", "several_steps_at_once", "a_part_of_each_run", "an_error_and_another_fit"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}


@lru_cache
def launch(backend: str, num_workers: int, *words: str) -> Ended:
    directory = Path(tempfile.mkdtemp(prefix="duoka-restarting"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    given = ["--devices", str(num_workers), "--replicas", "2", str(SCRIPT), *words]
    run = Run(directory, [*DUOKA_RUN, *given], env=ONE_THREAD | {"KERAS_BACKEND": backend})
    ended = run.finish(280, leaves=[""])  # the frameworks leave temporary files of their own
    assert ended.code == 0, ended.err[-3000:]
    return ended


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case[:2])) + ("-few" if case[2:] else ""))
def runs(request) -> tuple[dict, Ended]:
    """What one worker found, and how the run with a reader that is killed has ended."""
    backend, num_workers, *names = request.param
    return launch(backend, 1, *names).facts()[0], launch(backend, num_workers, "--struck", *names)


def test_the_bits_are_those_of_one_worker_in_every_fit_and_after_the_reader_is_killed(runs):
    alone, ended = runs
    assert ended.err.count("was ended by SIGKILL") == 1
    first, last = (ended.facts()[worker] for worker in (0, 1))
    assert last.keys() == alone.keys() == first.keys() | {"reader_dies_in_a_second_fit"}
    for facts in (first, last):
        for name in facts:
            for part in facts[name].keys() - {"read"}:
                assert facts[name][part] == alone[name][part], name


def test_one_worker_reads_them_for_all_without_being_asked_and_says_so_once(runs):
    alone, ended = runs
    assert ended.said().count("worker 0 reads a tf.data dataset for all from now on") == 1
    first, last = (ended.facts()[worker] for worker in (0, 1))
    for name in SHARED & alone.keys():
        assert last[name]["read"] <= first[name]["read"] / 2, name


def test_the_next_reader_reads_what_it_had_left_to_the_one_that_was_killed(runs):
    _, ended = runs
    (line,) = [line for line in ended.said() if "the worker that read for all was lost" in line]
    assert "worker 1 has read the" in line


def test_only_datasets_without_state_are_taken_for_such(runs):
    alone, _ = runs
    assert alone["who_restarts"]["restarts"] == RESTARTING
