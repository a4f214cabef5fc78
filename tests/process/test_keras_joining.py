"""Workers of Keras's `fit` that were killed come back: they run the script from its top, and join mid-epoch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.scripts import PYTHON, Ended, Run

SCRIPT = Path(__file__).with_name("keras_joining.py")
LEAVES = ("torchinductor", "__autograph_generated_file")
CASES = [
    pytest.param("torch", [[0, 1, 2]], marks=pytest.mark.torch),
    *(
        pytest.param(name, [[0, 1, 2], [1, 4, 3]], marks=[getattr(pytest.mark, name), pytest.mark.slow])
        for name in ("torch", "jax", "tensorflow")
    ),
]
STREAMS = [
    pytest.param(backend, kind, marks=[getattr(pytest.mark, backend), pytest.mark.slow])
    for backend, kind in (
        *(("tensorflow", "dataset"), ("jax", "dataset"), ("torch", "dataset"), ("tensorflow", "rows")),
        *(("torch", "rows"), ("torch", "loader"), ("torch", "generator"), ("jax", "generator")),
    )
]


def train(place: Path, backend: str, strikes: list[list[int]], **given) -> Ended:
    lives = place / "lives"
    lives.mkdir(parents=True)
    words = [*PYTHON, str(SCRIPT), json.dumps({"strikes": strikes, "directory": str(lives), **given})]
    return Run(place, words, env={"KERAS_BACKEND": backend}).finish(300, LEAVES)


@pytest.mark.slow
@pytest.mark.parametrize("backend, strikes", CASES)
def test_workers_that_come_back_join_a_fit_and_the_bits_are_those_of_a_calm_run(backend, strikes, tmp_path):
    calm = train(tmp_path / "calm", backend, [])
    struck = train(tmp_path / "struck", backend, strikes, saves=len(strikes) > 1)
    compare(calm, struck, strikes)


@pytest.mark.parametrize("backend, kind", STREAMS)
def test_a_worker_that_comes_back_reads_a_stream_up_to_the_others_and_joins(backend, kind, tmp_path):
    calm = train(tmp_path / "calm", backend, [], kind=kind)
    strikes = [[0, 1, 2]]
    compare(calm, train(tmp_path / "struck", backend, strikes, kind=kind), strikes)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_stream_that_is_another_one_each_time_keeps_a_worker_from_coming_back_and_harms_nobody(tmp_path):
    calm = train(tmp_path / "calm", "tensorflow", [], kind="dataset", unseeded=True)
    struck = train(tmp_path / "struck", "tensorflow", [[0, 1, 2]], kind="dataset", unseeded=True)
    assert struck.code == 0, struck.err[-3000:]
    assert "worker 0 (cpu:0/v0) was ended by SIGKILL" in struck.err
    line = "worker 0 (cpu:0/v0) could not join: Its data come in another order than those of the others; the run goes"
    assert struck.err.count(line) == 1, struck.err
    assert struck.facts()[1]["facts"] == calm.facts()[0]["facts"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "jax", "tensorflow")]
)
def test_gradients_that_depend_on_what_the_script_has_not_registered_remove_the_replacement(backend, tmp_path):
    calm = train(tmp_path / "calm", backend, [], anneals=True)
    struck = train(tmp_path / "struck", backend, [[0, 1, 2]], anneals=True)
    assert struck.code == 0, struck.err[-3000:]
    assert "worker 0 (cpu:0/v0) has rejoined at step " in struck.err
    line = (
        "worker 0 (cpu:0/v0) was removed: it computed other gradients than worker 1 from the same samples and weights"
    )
    assert struck.err.count(line) in (1, 2), struck.err
    assert struck.facts()[1]["facts"] == calm.facts()[0]["facts"]


def compare(calm: Ended, struck: Ended, strikes: list[list[int]]) -> None:
    """Each strike has happened, each worker has come back, and all of them know what nobody was killed for."""
    assert calm.code == 0, calm.err[-3000:]
    assert struck.code == 0, struck.err[-3000:]
    for worker, _, _ in strikes:
        who = f"worker {worker} (cpu:0/v{worker})"
        assert f"{who} was ended by SIGKILL; 1 worker goes on" in struck.err, struck.err
        assert f"{who} has rejoined at step " in struck.err, struck.err
    expected, found = calm.facts(), struck.facts()
    assert {worker: facts["life"] for worker, facts in found.items()} == {
        worker: 1 + sum(struck == worker for struck, _, _ in strikes) for worker in (0, 1)
    }
    for worker in (0, 1):
        assert found[worker]["facts"] == expected[0]["facts"], worker
