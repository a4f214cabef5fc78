"""Runs of Keras's `fit` that are ended in every way, and go on from their checkpoints with the bits of a calm one."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import PYTHON, Ended, Run, write

SCRIPT = Path(__file__).with_name("keras_checkpoints.py")
LEAVES = ("torchinductor", "__autograph_generated_file")  # empty folders of PyTorch's, what TensorFlow compiles
BACKENDS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "jax", "tensorflow")]


def start(place: Path, backend: str, log: str = "logs", **given) -> Run:
    (place / log).mkdir(parents=True, exist_ok=True)
    given |= {"folder": str(place / log)}
    env = {"KERAS_BACKEND": backend}
    return Run(place, [*PYTHON, str(SCRIPT), json.dumps(given)], env=env)


def hash_of(ended: Ended) -> str:
    assert ended.code == 0, ended.err[-3000:]
    return next(line for line in ended.out.splitlines() if line.startswith("hash"))


def newest(directory: Path) -> Path:
    return max((directory / "saved").glob("step-*"))


def kill_all(run: Run) -> None:
    for pid in run.workers().values():
        os.kill(pid, signal.SIGKILL)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 137 and "no worker is left" in ended.err, ended.err


@pytest.mark.torch
def test_a_second_fit_whose_workers_are_all_killed_goes_on_to_the_bits_of_a_calm_one(tmp_path):
    calm_run = start(tmp_path / "other", "torch", log="calm", workers=1, epochs=3)
    given = {"directory": str(tmp_path / "saved"), "epochs": 3}

    run = start(tmp_path, "torch", workers=2, seconds=0.1, **given)
    run.wait_for("did fit1 18 ", timeout_s=START_S)
    kill_all(run)

    ended = start(tmp_path, "torch", workers=3, **given).finish(START_S, LEAVES)
    assert hash_of(ended) == hash_of(calm_run.finish(START_S, LEAVES))
    assert "resumed from" in ended.err and "did fit0" not in ended.out
    assert "did fit1 14 " not in ended.out and "did fit1 20 " in ended.out
    compare_logs(tmp_path, beside="other/calm")


@pytest.mark.slow
@pytest.mark.torch
def test_a_model_that_only_a_callback_trains_is_said_not_to_be_saved(tmp_path):
    source = """
        import keras, numpy as np
        import duoka

        strategy = duoka.Mirrored(devices=1)
        strategy.checkpoint("saved", every_steps=2)
        x = np.ones((8, 2), "float32")

        def make(name):
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name=name)
            model.compile("sgd", "mse")
            return model

        with strategy.scope():
            outer, known, inner = make("outer"), make("known"), make("inner")

        class Mine(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                for model in (known, inner):
                    model.fit(x, x[:, :1], verbose=0)

        for model in (known, outer):
            model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[Mine()] if model is outer else [])
    """
    write(tmp_path, source)
    run = Run(tmp_path, [*PYTHON, "script.py"], env={"KERAS_BACKEND": "torch"})
    run.process.wait(START_S)
    assert run.process.returncode == 0, run.err
    assert run.err.count("is trained by a callback inside of a fit, and checkpoints do not hold it") == 1, run.err
    assert "inner is trained by a callback" in run.err
    run.end()


def compare_logs(place: Path, num_fits: int = 2, beside: str = "calm") -> None:
    """Each epoch has its line, once."""
    for log in (f"log{number}.csv" for number in range(num_fits)):
        assert (place / "logs" / log).read_text() == (place / beside / log).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fit_that_is_ended_in_every_way_goes_on_to_the_bits_and_the_history_of_a_calm_one(backend, tmp_path):
    calm = hash_of(start(tmp_path, backend, log="calm", workers=2).finish(START_S, LEAVES))
    given = {"directory": str(tmp_path / "saved"), "seconds": 0.1}

    run = start(tmp_path, backend, workers=2, **given)  # all workers are killed, in the first fit
    run.wait_for("did fit0 18 ", timeout_s=START_S)
    kill_all(run)

    run = start(tmp_path, backend, workers=1, **given)  # preempted in the second one, on another number of workers
    run.wait_for("did fit1 5 ", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143, ended.err
    assert "resumed from" in ended.err and "is saved in" in ended.err and "did fit0 1 " not in ended.out, ended.err
    saved = int(newest(tmp_path).name.removeprefix("step-"))

    run = start(tmp_path, backend, workers=3, **given)  # the supervisor is killed
    run.wait_for("did fit1 12 ", timeout_s=START_S)
    run.signal(signal.SIGKILL)
    run.process.wait(START_S)
    run.wait_until_all_are_gone()
    assert f"step {saved}, epoch" in run.err and "did fit0" not in run.out and "did fit1 4 " not in run.out

    ended = start(tmp_path, backend, workers=2, directory=given["directory"]).finish(START_S, LEAVES)
    assert hash_of(ended) == calm
    compare_logs(tmp_path)
    again = start(tmp_path, backend, log="again", workers=1, directory=given["directory"]).finish(START_S, LEAVES)
    assert hash_of(again) == calm and "did" not in again.out  # a finished run trains no more


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        pytest.param("torch", ["loader", "generator", "rows"], marks=pytest.mark.torch),
        pytest.param("jax", ["rows", "arrays", "generator"], marks=pytest.mark.jax),
        pytest.param("tensorflow", ["dataset", "rows", "drawing"], marks=pytest.mark.tensorflow),
    ],
)
def test_every_source_of_batches_goes_on_with_the_next_one(backend, kinds, tmp_path):
    calm = hash_of(start(tmp_path, backend, log="calm", workers=1, kinds=kinds).finish(START_S, LEAVES))
    given = {"directory": str(tmp_path / "saved"), "kinds": kinds}
    for number, (workers, place) in enumerate([(2, "fit1 12 "), (1, "fit2 10 ")]):
        run = start(tmp_path, backend, workers=workers, seconds=0.1, **given)
        run.wait_for(f"did {place}", timeout_s=START_S)
        kill_all(run)
        assert ("resumed from" in run.err) == (number > 0)
    assert hash_of(start(tmp_path, backend, workers=2, **given).finish(START_S, LEAVES)) == calm


@pytest.mark.slow
@pytest.mark.torch
def test_a_loop_of_train_on_batch_that_draws_its_batches_goes_on_with_the_next_one(tmp_path):
    by_hand = {"by_hand": True, "kinds": [], "workers": 1}
    calm = hash_of(start(tmp_path, "torch", log="calm", **by_hand).finish(START_S, LEAVES))
    given = by_hand | {"directory": str(tmp_path / "saved")}
    run = start(tmp_path, "torch", seconds=0.1, **given)
    run.wait_for("did batch 13", timeout_s=START_S)
    kill_all(run)
    ended = start(tmp_path, "torch", **given).finish(START_S, LEAVES)
    assert "resumed from" in ended.err
    assert hash_of(ended) == calm


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fit_with_one_replica_goes_on_to_the_bits_of_plain_keras(backend, tmp_path):
    alone = {"workers": 1, "replicas": 1}
    calm = hash_of(start(tmp_path, backend, log="calm", **alone).finish(START_S, LEAVES))
    given = alone | {"directory": str(tmp_path / "saved"), "seconds": 0.05}

    run = start(tmp_path, backend, **given)
    run.wait_for("did fit0 18 ", timeout_s=START_S)
    run.signal(signal.SIGKILL)
    run.process.wait(START_S)

    run = start(tmp_path, backend, **given)
    run.wait_for("did fit1 5 ", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143 and "resumed from" in ended.err and "did fit0 14 " not in ended.out, ended.err

    ended = start(tmp_path, backend, **given).finish(START_S, LEAVES)
    assert hash_of(ended).split()[1] == calm.split()[1]
    assert "resumed from" in ended.err and "did fit0" not in ended.out and "did fit1 4 " not in ended.out
    compare_logs(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "kinds", "replicas"),
    [
        pytest.param("torch", ["arrays"], 4, marks=pytest.mark.torch),
        pytest.param("torch", ["loader"], 4, marks=pytest.mark.torch),
        pytest.param("jax", ["arrays"], 4, marks=pytest.mark.jax),
        pytest.param("jax", ["rows"], 1, marks=pytest.mark.jax),
        pytest.param("tensorflow", ["dataset"], 4, marks=pytest.mark.tensorflow),
        pytest.param("tensorflow", ["arrays"], 1, marks=pytest.mark.tensorflow),
    ],
)
def test_a_finished_fit_that_is_given_more_epochs_ends_with_the_bits_of_a_longer_one(
    backend, kinds, replicas, tmp_path
):
    given = {"kinds": kinds, "workers": min(2, replicas), "replicas": replicas, "plain_end": True, "patience": 9}
    calm = hash_of(start(tmp_path, backend, log="calm", epochs=4, **given).finish(START_S, LEAVES))
    given["directory"] = str(tmp_path / "saved")
    assert start(tmp_path, backend, epochs=2, **given).finish(START_S, LEAVES).code == 0
    ended = start(tmp_path, backend, epochs=4, **given).finish(START_S, LEAVES)
    assert hash_of(ended).split()[1] == calm.split()[1] and "did fit0 14 " not in ended.out
    compare_logs(tmp_path, len(kinds))


@pytest.mark.slow
@pytest.mark.torch
def test_a_finished_fit_goes_on_with_more_epochs_or_says_why_it_cannot(tmp_path):
    given = {"kinds": ["arrays"], "workers": 1, "patience": 9}
    calm = hash_of(start(tmp_path, "torch", log="calm", epochs=3, plain_end=True, **given).finish(START_S, LEAVES))
    given["directory"] = str(tmp_path / "saved")
    assert start(tmp_path, "torch", epochs=2, plain_end=True, **given).finish(START_S, LEAVES).code == 0
    ended = start(tmp_path, "torch", epochs=3, plain_end=True, **given).finish(START_S, LEAVES)
    assert hash_of(ended) == calm and "did fit0 14 " not in ended.out and "did fit0 15 " in ended.out
    compare_logs(tmp_path, 1)
    ended = start(tmp_path, "torch", epochs=2, plain_end=True, **given).finish(START_S, LEAVES)
    assert ended.code == 1 and "was over after 3 epochs when this run was saved, and is asked for 2" in ended.err


@pytest.mark.slow
@pytest.mark.torch
def test_more_epochs_of_a_fit_whose_end_changed_the_model_or_that_was_followed_by_another_are_refused(tmp_path):
    given = {"directory": str(tmp_path / "saved"), "workers": 1}
    given["changes_end"] = True
    assert start(tmp_path, "torch", epochs=2, kinds=["arrays"], **given).finish(START_S, LEAVES).code == 0
    ended = start(tmp_path, "torch", epochs=3, kinds=["arrays"], **given).finish(START_S, LEAVES)
    assert ended.code == 1 and "its end has changed the model" in ended.err, ended.err
    assert start(tmp_path, "torch", epochs=2, **given).finish(START_S, LEAVES).code == 0
    ended = start(tmp_path, "torch", epochs=3, **given).finish(START_S, LEAVES)
    assert ended.code == 1 and "training went on after it" in ended.err, ended.err


@pytest.mark.slow
@pytest.mark.torch
def test_another_model_seed_number_of_replicas_or_backend_is_refused_with_the_difference(tmp_path):
    given = {"directory": str(tmp_path / "saved"), "workers": 1}
    assert start(tmp_path, "torch", **given).finish(START_S, LEAVES).code == 0
    for other, words in (
        (
            {"width": 5},
            "sequential/dense/kernel is (8, 5) float32 here, and sequential/dense/kernel (8, 16) float32 saved",
        ),
        ({"optimizer": "SGD"}, "the optimizer is SGD here, and Adam in the saved run"),
        ({"seed": 3}, "is of a run with seed=0; this one has seed=3"),
        ({"replicas": 2}, "is of a run with replicas=4; this one has replicas=2"),
        ({"replicas": 1}, "is of a run with replicas=4; this one has replicas=1"),
    ):
        ended = start(tmp_path, "torch", **{**given, **other}).finish(START_S, LEAVES)
        assert ended.code == 1 and words in ended.err, ended.err
    ended = start(tmp_path, "torch", rate=0.5, beta=0.8, **given).finish(START_S, LEAVES)
    assert ended.code == 0 and ended.err.count("the optimizer of sequential is") == 2, ended.err
    assert re.search(r"resumed from .*: step \d+, after 3 epochs and 0 batches, ", ended.err), (
        "a callback had stopped it"
    )
    for line in (
        "the saved run goes on with its own values, not with those of this script:"
        " learning_rate of the optimizer of sequential is 0.5 here, and was 0.01",
        "the run goes on with values of this script, not with those of the saved run:"
        " beta_1 of the optimizer of sequential is 0.8 here, and was 0.9",
    ):
        assert f"duoka: {line}\n" in ended.err, ended.err
    ended = start(tmp_path, "jax", **given).finish(START_S, LEAVES)
    assert ended.code == 1 and "is one of keras on torch, and this run is keras on jax" in ended.err, ended.err
