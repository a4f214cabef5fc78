"""Streams that take long to read are read by one worker for all: the same batches, also when that one is killed."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from tests.process.scripts import DUOKA_RUN, Ended, Run

SCRIPT = Path(__file__).parent / "keras_reading.py"
FEW = ("generator_twice", "changing_dataset_twice", "reader_dies_while_it_reads")
# PyTorch starts fastest; the others are part of the full matrix. On three workers the reader is killed twice.
FULL = [
    pytest.param(("torch", 3), marks=[pytest.mark.torch, pytest.mark.slow]),
    pytest.param(("tensorflow", 3), marks=[pytest.mark.tensorflow, pytest.mark.slow]),
    pytest.param(("jax", 3), marks=[pytest.mark.jax, pytest.mark.slow]),
]
CASES = [pytest.param(("torch", 2, *FEW), marks=[pytest.mark.torch, pytest.mark.slow]), *FULL]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}


@lru_cache
def launch(backend: str, num_workers: int, num_replicas: int, *words: str) -> Ended:
    directory = Path(tempfile.mkdtemp(prefix="duoka-reading"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    given = ["--devices", str(num_workers), "--replicas", str(num_replicas), str(SCRIPT), *words]
    run = Run(directory, [*DUOKA_RUN, *given], env=ONE_THREAD | {"KERAS_BACKEND": backend})
    ended = run.finish(280, leaves=[""])  # the frameworks leave temporary files of their own
    assert ended.code == 0, ended.err[-3000:]
    return ended


@dataclass(frozen=True)
class Found:
    backend: str
    num_workers: int
    expected: dict  # what one worker finds, or all of them when each reads for itself
    ended: Ended

    @property
    def facts(self) -> dict[int, dict]:
        """Of each worker, until it was killed."""
        return {worker: facts["by_one"] for worker, facts in self.ended.facts().items()}

    def of_all(self, name: str, part: str) -> list:
        return [self.facts[worker][name][part] for worker in range(self.num_workers)]


def find(backend: str, num_workers: int, *few: str) -> Found:
    """A few scenarios run twice in one launch, which saves another one; all of them are compared with one worker."""
    if few:
        ended = launch(backend, num_workers, num_workers, "--twice", "--struck", *few)
        return Found(backend, num_workers, ended.facts()[num_workers - 1]["by_all"], ended)
    alone = launch(backend, 1, 4).facts()[0]["by_one"]
    return Found(backend, num_workers, alone, launch(backend, num_workers, 4, "--struck"))


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def found(request) -> Found:
    return find(*request.param)


@pytest.fixture(params=FULL, ids=lambda case: f"{case[0]}-{case[1]}")
def found_in_full(request) -> Found:
    return find(*request.param)


def test_the_bits_are_the_same_whoever_reads(found):
    assert found.ended.err.count("was ended by SIGKILL") == found.num_workers - 1
    last = found.facts[found.num_workers - 1]
    assert last.keys() == found.expected.keys()
    for facts in found.facts.values():
        for name in facts:
            for part in ("sha256", "history"):
                assert facts[name][part] == found.expected[name][part], name


def test_one_worker_reads_what_takes_long_and_the_others_stop(found):
    for name in ("generator_twice", "changing_dataset_twice"):
        reader, *others = found.of_all(name, "read")
        assert reader == found.expected[name]["read"], name
        assert max(others) < reader, name
    if found.backend == "torch":  # elsewhere steps are compiled while it is measured, or streams are read ahead
        assert set(found.of_all("generator_twice", "read")[1:]) == {12}, (
            "ten, and one that Keras looks at in each training"
        )
    assert found.ended.said().count("worker 0 reads a generator for all from now on") == 1


def test_a_dataset_shuffles_itself_as_ever_though_another_worker_has_drawn(found):
    if found.backend == "tensorflow":
        pytest.skip("there threads read ahead and draw, on one worker, too")
    assert found.of_all("changing_dataset_twice", "order")[0] == found.expected["changing_dataset_twice"]["order"]


def test_it_is_said_when_only_the_reader_knows_the_order(found):
    assert sum("only the worker that reads a PyDataset knows its order" in line for line in found.ended.said()) == 1


def test_what_takes_no_time_is_read_by_all(found_in_full):
    last = found_in_full.facts[found_in_full.num_workers - 1]
    assert last["quick_generator"]["sha256"] == last["slow_generator"]["sha256"], "read by all, and by one"
    if found_in_full.backend == "torch":
        assert set(found_in_full.of_all("quick_generator", "read")) == {39}


def test_what_streams_draw_from_global_generators_is_as_on_one_worker_afterwards(found_in_full):
    if found_in_full.backend == "tensorflow":
        pytest.skip("there threads read ahead and draw, on one worker, too")
    alone = found_in_full.expected["slow_dataset"]["drawn"]
    assert found_in_full.of_all("slow_dataset", "drawn") == [alone] * found_in_full.num_workers


def test_an_error_of_the_stream_is_raised_by_the_reader_and_named_on_all_others(found_in_full):
    found = found_in_full
    assert all(found.of_all("broken_stream", "names"))
    reader, *others = found.of_all("broken_stream", "error")
    assert reader == found.expected["broken_stream"]["error"]
    if found.backend == "torch":
        assert set(others) == {"WorkerFailed"}


def test_a_batch_that_cannot_be_shared_is_read_by_all(found_in_full):
    found = found_in_full
    if found.backend == "tensorflow":
        pytest.skip("a generator has one structure there")
    assert set(found.of_all("batch_that_cannot_be_shared", "read")) == {20}


def test_whoever_reads_next_says_so(found):
    said = [line for line in found.ended.said() if "the worker that read for all was lost" in line]
    assert said[0].partition(": ")[2].startswith("worker 1 has read the")
