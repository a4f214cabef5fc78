"""When checkpoints are taken, seen from one worker: without processes, and with a training of one array."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import numpy as np
import pytest

from duoka.checkpoint.codec import NumpyCodec
from duoka.checkpoint.disk import Disk
from duoka.checkpoint.store import Store
from duoka.checkpoint.writer import BackgroundWriter
from duoka.collectives.solo import solo
from duoka.errors import CheckpointError
from duoka.strategies.borders import Borders
from duoka.strategies.checkpoints import Checkpoints
from duoka.strategies.rhythm import Rhythm


class Training:
    """Its second array is there after the first step, like the state of an optimizer."""

    def __init__(self) -> None:
        self.step = self.batch = 0
        self.is_repeating = False

    def capture(self) -> dict:
        arrays = [np.zeros(1000), *([np.zeros(2000)] if self.step else [])]
        known = {"framework": "none", "step": self.step, "batch": self.batch, "epoch": 0, "position": []}
        return known | {"arrays": arrays, "agreed_step": None}

    def restore(self, state: dict) -> None:
        self.step, self.batch = state["step"], state["batch"]

    def come_to_save(self) -> bool:
        return not self.is_repeating


@pytest.fixture
def session() -> SimpleNamespace:
    said: list[str] = []
    at_exit: list = []
    at_end: list = []
    session = SimpleNamespace(
        collective=solo(1, available_bytes=lambda: 2**40),
        borders=Borders(),
        seed=0,
        run="calm",
        num_replicas=1,
        num_workers=1,
        is_newcomer=False,
        is_asked_to_end=False,
        listen_for_termination=lambda: lambda: session.is_asked_to_end,
        say_that_it_ends=lambda: None,
        say_whether_it_trains=lambda is_training: None,
        keep_checkpoints=lambda directory, *, resumes: None,
        list_codecs=lambda: [NumpyCodec()],
        fingerprint=dict,
        say=said.append,
        said=said,
        at_exit=at_exit.append,
        at_end_of_script=at_end.append,
        ends=at_end,
        exits=at_exit,
    )
    return session


class Full(Disk):
    """Until somebody makes room."""

    is_full = True

    def create(self, path: str) -> int:
        if self.is_full and path.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


def store_in(session: SimpleNamespace, directory, disk: Disk | None) -> Store:
    return Store(directory, say=session.said.append, disk=disk)


class Tracker:
    """A user's own."""

    def __init__(self, best: float = 0.0) -> None:
        self.best = best

    def state_dict(self) -> dict:
        return {"best": self.best}

    def load_state_dict(self, state: dict) -> None:
        self.best = state["best"]


class OtherTracker(Tracker):
    pass


def begin(
    session: SimpleNamespace, directory, training: Training, every: int, disk: Disk | None = None, **also
) -> Checkpoints:
    session.borders.also.objects = also
    checkpoints = Checkpoints(session, store_in(session, directory, disk), Rhythm(every), {}, lambda: True)
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
    for function in (*session.ends, *session.exits):
        function()
    assert session.said == [] and Store(tmp_path).names() == []


@pytest.mark.parametrize(("every", "kept"), [(2, "step 4 is the last one that is saved"), (100, "nothing is saved")])
def test_a_script_that_does_not_come_to_its_end_says_what_is_saved(session, tmp_path, every, kept):
    training = Training()
    checkpoints = begin(session, tmp_path, training, every=every)
    walk(checkpoints, training, 5)
    checkpoints.wait()
    session.exits[0]()
    assert session.said == [f"the script has not come to its end: {kept} in {tmp_path}"]


def test_a_save_that_failed_is_an_error_is_not_counted_and_is_tried_again(session, tmp_path):
    training, disk = Training(), Full()
    checkpoints = begin(session, tmp_path, training, every=4, disk=disk)
    walk(checkpoints, training, 5)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="step 5 could not be saved"):
            checkpoints.save()
    assert Store(tmp_path).names() == []
    disk.is_full = False
    checkpoints.save()
    assert Store(tmp_path).names() == ["step-00000005"]
    for function in session.exits:
        function()
    assert "1 checkpoint in" in session.said[-1] and session.said[-1].endswith("; 3 more could NOT be saved")


def test_a_save_that_is_asked_for_has_what_the_script_changed_since_the_step_was_saved(session, tmp_path):
    training, tracker = Training(), Tracker()
    with begin(session, tmp_path, training, every=100, tracker=tracker) as checkpoints:
        walk(checkpoints, training, 3)
        checkpoints.at_end(training)
        tracker.best = 1.0
        checkpoints.save()
        assert _saved_best(session, tmp_path) == 1.0
        tracker.best = 2.0
    assert _saved_best(session, tmp_path) == 2.0
    assert Store(tmp_path).names() == ["step-00000003", "step-00000003-2", "step-00000003-3"]


def _saved_best(session: SimpleNamespace, directory) -> float:
    found = Store(directory).newest(session.list_codecs())
    assert found is not None
    return found.state["also"]["tracker"]["best"]


@pytest.mark.parametrize("is_full", [True, False])
def test_a_run_that_is_asked_to_end_says_whether_its_step_is_saved(session, tmp_path, is_full):
    training, disk = Training(), Full()
    disk.is_full = is_full
    checkpoints = begin(session, tmp_path, training, every=100, disk=disk)
    walk(checkpoints, training, 5)
    session.is_asked_to_end = True
    with pytest.raises(SystemExit) as exit:
        checkpoints.at_border(training)
    assert exit.value.code == 143
    assert session.said[-1] == f"SIGTERM: step 5 is {'NOT ' if is_full else ''}saved in {tmp_path}"
    assert Store(tmp_path).names() == ([] if is_full else ["step-00000005"])


def test_the_end_of_a_block_saves_and_does_not_fail_for_a_full_disk(session, tmp_path):
    training, disk = Training(), Full()
    with begin(session, tmp_path, training, every=100, disk=disk) as checkpoints:
        walk(checkpoints, training, 3)
    assert "step 3 was not saved" in session.said[-1] and Store(tmp_path).names() == []
    disk.is_full = False
    with checkpoints:
        pass
    assert Store(tmp_path).names() == ["step-00000003"]


def test_things_that_are_saved_along_are_named_when_they_are_on_one_side_only(session, tmp_path):
    training = Training()
    checkpoints = begin(session, tmp_path, training, every=3, old=Tracker(5.0), kept=Tracker(7.0))
    walk(checkpoints, training, 4)
    new, kept = Tracker(1.0), Tracker(2.0)
    begin(session, tmp_path, Training(), every=3, new=new, kept=kept)
    assert (new.best, kept.best) == (1.0, 7.0)
    assert session.said[-1] == (
        "registered objects are not those of the saved run: 'old' was saved, and is not given here; 'new' was not"
        " saved,"
        " and begins as it is given"
    )
    untouched = Training()
    with pytest.raises(
        CheckpointError, match="'kept' is registered as OtherTracker here, and Tracker in the saved run"
    ):
        begin(session, tmp_path, untouched, every=3, old=Tracker(), kept=OtherTracker())
    assert untouched.step == 0


def test_a_script_on_its_way_to_where_it_was_saved_saves_nothing(session, tmp_path):
    training = Training()
    checkpoints = begin(session, tmp_path, training, 100)
    training.is_repeating = True
    checkpoints.save()
    assert store_in(session, tmp_path, None).names() == []
    training.is_repeating = False
    checkpoints.save()
    assert store_in(session, tmp_path, None).names() == ["step-00000000"]
