"""Datasets of tf.data that begin anew are read by one worker for all, without being asked; all else by every worker."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

from tests.process.scripts import DUOKA_RUN, Ended, Run

pytestmark = [pytest.mark.tensorflow]
SCRIPT = Path(__file__).parent / "keras_restarting.py"
FEW = ("who_restarts", "reader_dies_in_a_second_fit")
# All of it is part of the full matrix: that a reader is lost and made up for, `make test` sees in test_keras_reading.
CASES = [
    pytest.param(("tensorflow", 2, *FEW), marks=[pytest.mark.slow]),
    pytest.param(("tensorflow", 2), marks=[pytest.mark.slow]),
    pytest.param(("torch", 2), marks=[pytest.mark.torch, pytest.mark.slow]),
    pytest.param(("jax", 2), marks=[pytest.mark.jax, pytest.mark.slow]),
]
RESTARTING = ["pictures", "folder", "slices", "records", "interleaved"]
SHARED = {
    *("two_fits", "several_steps_at_once", "a_part_of_each_run", "an_error_and_another_fit"),
    "reader_dies_in_a_second_fit",
}
COUNT = 17  # batches of an epoch
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
    """What is expected of all, and how the run with a reader that is killed has ended.

    A few scenarios run twice in one launch, by every worker first; all of them are compared with one worker.
    """
    backend, num_workers, *few = request.param
    if few:
        ended = launch(backend, num_workers, "--twice", "--struck", *few)
        return ended.facts()[1]["by_all"], ended
    return launch(backend, 1).facts()[0]["by_one"], launch(backend, num_workers, "--struck")


def found_by(ended: Ended) -> list[dict]:
    return [ended.facts()[worker]["by_one"] for worker in (0, 1)]


def test_the_bits_are_the_same_in_every_fit_and_after_the_reader_is_killed(runs):
    expected, ended = runs
    assert ended.err.count("was ended by SIGKILL") == 1
    first, last = found_by(ended)
    assert last.keys() == expected.keys() == first.keys() | {"reader_dies_in_a_second_fit"}
    for facts in (first, last):
        for name in facts:
            for part in facts[name].keys() - {"read"}:
                assert facts[name][part] == expected[name][part], name


def test_one_worker_reads_them_for_all_without_being_asked_and_says_so_once(runs):
    expected, ended = runs
    assert ended.said().count("worker 0 reads a tf.data dataset for all from now on") == 1
    _, last = found_by(ended)
    for name in SHARED & expected.keys():
        num_epochs = sum(len(history["loss"]) for history in last[name]["history"])
        assert 11 <= last[name]["read"] <= num_epochs * COUNT / 2, name


def test_the_next_reader_reads_what_it_had_left_to_the_one_that_was_killed(runs):
    _, ended = runs
    (line,) = [line for line in ended.said() if "the worker that read for all was lost" in line]
    assert "worker 1 has read the" in line


def test_only_datasets_without_state_are_taken_for_such(runs):
    expected, _ = runs
    assert expected["who_restarts"]["restarts"] == RESTARTING
