"""When checkpoints are taken, seen from one worker: without processes, and with a training of one array."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from duoka.checkpoint.codec import NumpyCodec
from duoka.checkpoint.store import Store
from duoka.checkpoint.writer import BackgroundWriter
from duoka.collectives.solo import solo
from duoka.strategies.borders import Borders
from duoka.strategies.checkpoints import Checkpoints
from duoka.strategies.rhythm import Rhythm


class Training:
    """Its second array is there after the first step, like the state of an optimizer."""

    def __init__(self) -> None:
        self.step = self.batch = 0

    def capture(self) -> dict:
        arrays = [np.zeros(1000), *([np.zeros(2000)] if self.step else [])]
        known = {"framework": "none", "step": self.step, "batch": self.batch, "epoch": 0, "position": []}
        return known | {"arrays": arrays, "agreed_step": None}


@pytest.fixture
def session() -> SimpleNamespace:
    said: list[str] = []
    at_exit: list = []
    return SimpleNamespace(
        collective=solo(1, available_bytes=lambda: 2**40),
        borders=Borders(),
        seed=0,
        num_replicas=1,
        num_workers=1,
        is_newcomer=False,
        listen_for_termination=lambda: lambda: False,
        keep_checkpoints=lambda directory, *, resumes: None,
        list_codecs=lambda: [NumpyCodec()],
        fingerprint=dict,
        say=said.append,
        said=said,
        at_exit=at_exit.append,
        exits=at_exit,
    )


def begin(session: SimpleNamespace, directory, training: Training, every: int) -> Checkpoints:
    checkpoints = Checkpoints(session, Store(directory), Rhythm(every), {}, {}, lambda: True)
    checkpoints.find()
    checkpoints.begin(training)
    return checkpoints


def walk(checkpoints: Checkpoints, training: Training, num_steps: int) -> None:
    for _ in range(num_steps):
        checkpoints.at_border(training)
        checkpoints.wait(20)
        training.step += 1
        training.batch += 1


def test_memory_for_the_first_save_is_made_once_after_the_first_step(session, tmp_path, monkeypatch):
    reserved: list[int] = []
    monkeypatch.setattr(
        BackgroundWriter, "reserve", lambda self, state: reserved.append(sum(x.size for x in state["run"]["arrays"]))
    )
    training = Training()
    checkpoints = begin(session, tmp_path, training, every=4)
    walk(checkpoints, training, 10)
    assert reserved == [3000]
    assert Store(tmp_path).names() == ["step-00000004", "step-00000008"]


def test_a_run_that_has_saved_nothing_does_not_talk_of_checkpoints(session, tmp_path):
    training = Training()
    walk(begin(session, tmp_path, training, every=100), training, 3)
    for function in session.exits:
        function()
    assert session.said == [] and Store(tmp_path).names() == []
