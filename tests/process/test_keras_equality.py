"""Replicas stay equal in `fit` and in TensorFlow loops: a worker with a flipped bit is found, and removed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

from tests.process.results import read_result

HERE = Path(__file__).parent
PATHS = os.pathsep.join(filter(None, (str(HERE.parent.parent), os.environ.get("PYTHONPATH"))))
FITS = ("calm", "a_weight", "a_moment_of_adam", "a_weight_at_the_end_of_an_epoch")
LOOPS = (
    "a_calm_loop",
    "a_weight_in_a_loop",
    "a_moment_in_an_eager_loop",
    "a_calm_loop_inside_a_graph",
    "a_weight_in_a_loop_inside_a_graph",
)
BACKENDS = [
    pytest.param("torch", FITS, marks=[pytest.mark.torch]),
    pytest.param("jax", FITS, marks=[pytest.mark.jax, pytest.mark.slow]),
    pytest.param("tensorflow", (*FITS, *LOOPS), marks=[pytest.mark.tensorflow, pytest.mark.slow]),
]
DRIFTED = {
    "a_weight": [8, 1, "kernel"],
    "a_weight_at_the_end_of_an_epoch": [10, 1, "bias"],
    "a_weight_in_a_loop": [8, 1, "kernel"],
    "a_weight_in_a_loop_inside_a_graph": [8, 1, "kernel"],
}


@lru_cache
def run(backend: str, num_workers: int, names: tuple[str, ...]) -> tuple[int, str, str]:
    words = ["--devices", str(num_workers), "--replicas", "3", "--no-respawn", str(HERE / "keras_equality.py"), *names]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-m", "duoka", "run", *words],
            capture_output=True,
            text=True,
            timeout=280,
            cwd=directory,
            env=os.environ | one_thread | {"KERAS_BACKEND": backend, "PYTHONPATH": PATHS},
        )
    return done.returncode, done.stdout, done.stderr


FLIPS = [
    pytest.param(backend.values[0], name, marks=backend.marks)
    for backend in BACKENDS
    for name in backend.values[1]
    if "calm" not in name
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), FLIPS)
def test_a_worker_with_a_flipped_bit_is_named_and_removed(backend, name):
    code, out, err = run(backend, 3, (name,))
    assert code == 0, err[-3000:]
    (drifted,) = read_result(out)[name]["drifted"]  # the other workers end with the same weights and optimizer state
    # A wrong moment of the optimizer has made weights wrong, too: the first of them is named.
    assert drifted[:2] == [8, 1] if "moment" in name else drifted == DRIFTED[name]
    assert err.count("worker 1 (cpu:0/v1) was removed: it had other values than workers 0, 2 before step") == 1, err
    assert err.count("Gradients computed from wrong values since then are in the weights of all workers") == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_calm_runs_of_three_workers_compare_and_find_no_difference(backend):
    names = tuple(name for p in BACKENDS if p.values[0] == backend for name in p.values[1] if "calm" in name)
    for name, result in read_result(run(backend, 3, names)[1]).items():
        assert result["drifted"] == [] and list(result["digests"]) == ["0", "4", "8"], name


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "names"), [(p.values[0], p.values[1]) for p in BACKENDS[:3]])
def test_digests_do_not_depend_on_the_number_of_workers(backend, names):
    calm = tuple(name for name in names if "calm" in name)
    one, three = (read_result(run(backend, num_workers, calm)[1]) for num_workers in (1, 3))
    assert one == three


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["a_weight", "a_weight_in_a_loop_inside_a_graph", "a_moment_in_an_eager_loop"])
def test_two_workers_that_differ_stop_with_an_exit_code_of_their_own(name):
    code, out, err = run("tensorflow", 2, (name,))
    assert code == 76, err[-3000:]
    assert "RESULT" not in out
    assert "Before step 8 the replicas are no longer equal" in err
    assert "is not the same on workers 0 and 1" in err
