"""Workers of Keras's `fit`, and of TensorFlow loops, killed at any moment: the bits are those of an undisturbed run.

In one launch several trainings follow one another, and each of them loses a worker, until one is left.
`python -m tests.process.soak --replay fit-jax SEED` tells the story of one seed again.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import pytest

from tests.process.results import read_result_of_all
from tests.process.scripts import Ended, Run
from tests.process.strikes import Strike

SCRIPT = Path(__file__).with_name("keras_chaos.py")
REPLICAS = 4
FRAMEWORKS_LEAVE = ["torchinductor_", "__autograph_generated_file"]  # in the temporary directory, killed or not
KINDS = {"fit-torch": "torch", "fit-jax": "jax", "fit-tensorflow": "tensorflow", "loop-tensorflow": "tensorflow"}
BACKENDS = [pytest.param(kind, marks=getattr(pytest.mark, backend)) for kind, backend in KINDS.items()]


def run(kind: str, num_workers: int, plan: list[dict], folder: Path) -> Ended:
    words = [
        "--no-respawn",
        "--devices",
        str(num_workers),
        "--replicas",
        str(REPLICAS),
        str(SCRIPT),
        kind.partition("-")[0],
    ]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    started = Run(
        folder,
        [sys.executable, "-m", "duoka", "run", *words, json.dumps(plan), str(folder)],
        env=one_thread | {"KERAS_BACKEND": KINDS[kind]},
    )

    def list_leaves() -> list[str]:
        """Keras writes what it saves in a temporary folder first: that of a worker that is killed meanwhile stays."""
        return FRAMEWORKS_LEAVE + ["tmp"] * any(folder.glob("*-is-being-saved"))

    return started.finish(280, list_leaves)


@lru_cache
def calm(kind: str, num_trainings: int) -> tuple[list[dict], list[float]]:
    """Undisturbed, on one worker; and how many seconds each training took."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run(kind, 1, [{"strikes": [], "seconds": 0.0}] * num_trainings, Path(folder))
        assert ended.code == 0, ended.err[-3000:]
        result = read_result_of_all(ended.logs())
    return result, json.loads(re.findall("SECONDS (.*)", ended.out)[0])


def check(kind: str, num_workers: int, strikes: list[Strike]) -> Ended:
    """One strike for each training."""
    expected, seconds = calm(kind, len(strikes))
    plan = [{"strikes": [asdict(each)], "seconds": s} for each, s in zip(strikes, seconds, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        ended = run(kind, num_workers, plan, Path(folder))
        told = f"{plan}\n{ended.err[-3000:]}"
        # Killed at its very end, the main one may have left out what only it prints; then this is said.
        assert ended.code == (137 if "and was the main one" in ended.err else 0), told
        result = read_result_of_all(ended.logs())
        saved = sorted(path.name for path in Path(folder).glob("[!.]*.keras"))
        partial = [path.name for path in Path(folder).glob(".*.keras")]
    assert [f"worker {strike.worker} (" in ended.err for strike in strikes] == [True] * len(strikes), told
    assert ended.err.count("was ended by SIGKILL") == len(strikes), told
    assert result == expected, told
    if kind.startswith("fit"):
        where = [strike.at_place for strike in strikes]
        assert saved == [f"{n}.keras" for n in range(len(where))], f"{saved}: {told}"
        assert len(partial) == where.count("saving") or None in where, f"{partial}: {told}"
    return ended


def choose_strikes(kind: str, seed: int, num_trainings: int, num_workers: int) -> list[Strike]:
    chance = random.Random(f"{kind} {seed}")
    victims = chance.sample(range(num_workers), num_trainings)
    return [Strike(victim, after=chance.uniform(0.02, 1.0)) for victim in victims]


@pytest.mark.slow
@pytest.mark.torch
def test_a_worker_of_fit_killed_at_a_random_moment_changes_no_bit():
    check("fit-torch", 2, choose_strikes("fit-torch", 0, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", BACKENDS[:3])
def test_three_workers_killed_at_random_moments_of_three_trainings_change_no_bit(kind, seed):
    """TensorFlow loops have seeds of their own, in test_nothing_lost_tensorflow.py."""
    check(kind, 4, choose_strikes(kind, seed, 3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKENDS[:3])
def test_workers_killed_in_validation_in_a_callback_and_while_saving_change_no_bit(kind):
    """The file that was being written is written by another one."""
    check(
        kind,
        4,
        [
            Strike(0, at_place="validation", n=4),
            Strike(2, at_place="callback", n=1),
            Strike(1, at_place="saving"),
        ],
    )


@pytest.mark.slow
@pytest.mark.tensorflow
def test_workers_of_a_tensorflow_loop_killed_before_and_after_steps_change_no_bit():
    check(
        "loop-tensorflow",
        4,
        [Strike(0, at_place="batch", n=3), Strike(3, at_place="after step", n=7), Strike(1, at_place="batch", n=14)],
    )
