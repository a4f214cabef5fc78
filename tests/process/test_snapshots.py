"""Runs that lose all workers restart from a snapshot in memory, and end with the bits of an undisturbed one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Told
from tests.process.snapshot_training import (
    Notes,
    Story,
    keep_at,
    reference,
    run,
    run_body,
    train_plain,
    train_plain_richly,
    train_plain_steps,
)

pytestmark = [pytest.mark.torch]
LINE = re.compile(
    r"worker \d \(cpu:0/v\d\) was ended by SIGKILL; no worker is left; all workers restart from the (.*) of step (\d+)"
    r"( \(\d+\.\d s of training are repeated\))?\."
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> dict[str, Any]:
    return reference(tmp_path_factory.mktemp("calm"))


def restarts(told: Told) -> list[tuple[str, int]]:
    """From where all workers have started again."""
    found = [LINE.fullmatch(line) for line in told.said if "all workers restart" in line]
    assert all(found), told.said
    return [(match[1], int(match[2])) for match in found if match]


def check(told: Told, calm: dict[str, Any]) -> None:
    assert told.outcome.exit_code == 0, told.said
    for result in told.results.values():
        assert result == calm | {"resumed": True}, told.said


def late(notes: Notes, step: int) -> bool:
    return step == 47 and notes.is_first_life


def test_a_run_whose_workers_are_all_killed_ends_with_the_bits_of_an_undisturbed_one(tmp_path, calm):
    told = run(Story(tmp_path, late))
    check(told, calm)
    assert restarts(told) == [("snapshot in memory", 43)]
    assert len(told.outcome.lost) == 2 and Notes(tmp_path).read("life-1") == [0, 0]


def test_a_state_that_is_kept_when_it_is_due_is_restarted_from(tmp_path, calm):
    def soon(notes: Notes, step: int) -> bool:
        return notes.is_first_life and bool(notes.read("complete"))

    told = run(Story(tmp_path, soon, keeps=None, seconds=0.15))
    check(told, calm)
    assert restarts(told) == [("snapshot in memory", Notes(tmp_path).read("complete")[0])]


def test_a_worker_that_dies_while_it_writes_leaves_the_older_snapshot(tmp_path, calm):
    def follow(notes: Notes, step: int) -> bool:
        """The others die as soon as the writer has."""
        return notes.is_first_life and len(notes.read("begun")) >= 3

    told = run(Story(tmp_path, follow, torn=3))
    check(told, calm)
    assert Notes(tmp_path).read("begun")[:4] == [7, 13, 19, 19], "it died while it wrote"
    assert restarts(told) == [("snapshot in memory", 13)]


@pytest.mark.parametrize("given", [{"snapshot_s": None}, {"respawn": False}])
def test_without_snapshots_or_replacements_the_loss_of_all_ends_the_run(tmp_path, given):
    told = run(Story(tmp_path, late), **given)
    assert told.outcome.exit_code == 137 and not restarts(told)
    assert told.outcome.last_line.endswith("no worker is left.") and Notes(tmp_path).read("begun") == []
    assert Notes(tmp_path).read("life-0") == [0]


def test_a_snapshot_that_is_newer_than_the_last_checkpoint_is_taken(tmp_path, calm):
    told = run(Story(tmp_path, late, checkpoint={"every_steps": 24}))
    check(told, calm)
    assert restarts(told) == [("snapshot in memory", 43)] and (tmp_path / "saved" / "step-00000024").exists()


def test_a_checkpoint_that_is_newer_than_the_last_snapshot_is_taken(tmp_path, calm):
    def later(notes: Notes, step: int) -> bool:
        return (tmp_path / "saved" / "step-00000040").exists() and notes.is_first_life

    told = run(Story(tmp_path, later, checkpoint={"every_steps": 20}, seconds=0.03, keeps=(5,)))
    check(told, calm)
    assert Notes(tmp_path).read("complete") == [6] and restarts(told) == [("checkpoint", 40)]


def test_a_run_that_begins_anew_each_time_keeps_its_checkpoints_when_it_restarts(tmp_path, calm):
    told = run(Story(tmp_path, late, checkpoint={"every_steps": 20, "resume": False}))
    check(told, calm)
    assert [what for what, _ in restarts(told)] == ["snapshot in memory"]
    assert not list((tmp_path / "saved").glob("set-aside*"))


def test_three_starts_that_come_to_no_later_snapshot_are_the_last(tmp_path):
    def always(notes: Notes, step: int) -> bool:
        return step > 10

    told = run(Story(tmp_path, always))
    assert told.outcome.exit_code == 137, told.said
    assert restarts(told) == [("snapshot in memory", 7)] * 3
    assert "it has started 3 times from step 7, and has come to no later snapshot, and the run ends." in told.said[-1]
    assert Notes(tmp_path).read("life-1") == [0] * 4


def test_a_plain_loop_that_loses_a_worker_restarts_with_what_each_worker_had_counted(tmp_path):
    (tmp_path / "calm").mkdir()
    calm = run_body(lambda session: train_plain(session, Story(tmp_path / "calm")), snapshot_s=None)
    assert calm.outcome.exit_code == 0, (calm.said, calm.outcome.failure)
    assert calm.results[0]["seen"] != calm.results[1]["seen"]

    def strike(notes: Notes, step: int) -> bool:
        return notes.worker == 1 and step == 33 and notes.is_first_life

    told = run_body(lambda session: train_plain(session, Story(tmp_path, strike)))
    assert told.outcome.exit_code == 0, (told.said, told.outcome.failure)
    assert told.results == calm.results
    assert any("all workers restart from the snapshot in memory of step 3" in line for line in told.said), told.said


@pytest.mark.parametrize("at_step", [31, 35])
def test_steps_over_an_iterator_that_is_kept_restart_where_they_were(tmp_path, at_step):
    """Between two passes of a loader with persistent processes, and in one."""
    (tmp_path / "calm").mkdir()
    calm = run_body(lambda session: train_plain_steps(session, Story(tmp_path / "calm")), snapshot_s=None)
    assert calm.outcome.exit_code == 0, (calm.said, calm.outcome.failure)

    def strike(notes: Notes, step: int) -> bool:
        return notes.worker == 1 and step == at_step and notes.is_first_life

    story = Story(tmp_path, strike, keeps=(at_step - 2,))
    told = run_body(lambda session: train_plain_steps(session, story))
    assert told.outcome.exit_code == 0, (told.said, told.outcome.failure)
    assert told.results == calm.results
    assert any("all workers restart from the snapshot in memory" in line for line in told.said), told.said


@pytest.fixture(scope="module")
def rich(tmp_path_factory) -> dict[int, Any]:
    directory = tmp_path_factory.mktemp("rich")
    calm = run_body(lambda session: train_plain_richly(session, Story(directory)), snapshot_s=None)
    assert calm.outcome.exit_code == 0, (calm.said, calm.outcome.failure)
    assert calm.results[0]["own"] != calm.results[1]["own"]
    return calm.results


@pytest.mark.parametrize(("phase", "victim"), [("forward", 1), ("backward", 0), ("exchanged", 1), ("evaluation", 0)])
def test_a_plain_loop_of_many_kinds_restarts_to_the_numbers_of_an_undisturbed_run(tmp_path, rich, phase, victim):
    def strike(notes: Notes, step: int) -> bool:
        return notes.worker == victim and step >= 33 and notes.is_first_life

    told = run_body(lambda session: train_plain_richly(session, Story(tmp_path, strike), phase))
    assert told.outcome.exit_code == 0, (told.said, told.outcome.failure)
    assert any("all workers restart from the snapshot in memory of step 3" in line for line in told.said), told.said
    assert told.results == rich


class Sums:
    """Each worker's own state, changed by calls that cannot be done again after a loss."""

    can_be_snapshotted = every_worker_keeps_its_state = True

    def __init__(self, worker: int) -> None:
        self.step, self.own = 0, np.full(3, float(worker))
        self.restored_from = -1

    @property
    def batch(self) -> int:
        return self.step

    def capture(self) -> dict[str, Any]:
        return {"step": self.step, "own": self.own}

    def restore(self, state: dict[str, Any]) -> None:
        self.step, self.own = state["step"], state["own"]
        self.restored_from = self.step


def add_up(session: Any, directory: Path, *, is_calm: bool = False) -> dict[str, Any]:
    """Without a framework: what the runtime and the policy do for trainings of which every worker keeps its state."""
    training, collective, notes = Sums(session.worker), session.collective, Notes(directory, session.worker)
    notes.add(f"life-{session.worker}", 0)
    keep_at(tuple(range(6, 60, 6)))
    session.borders.resume(training)
    while training.step < 60:
        session.borders.at_border(training)
        collective.work_on(training.step, [session.worker])
        if not is_calm and (session.worker, training.step, notes.is_first_life) == (1, 41, True):
            os.kill(os.getpid(), signal.SIGKILL)
        total = collective.all_reduce([training.own])
        collective.end_step()
        training.own = training.own * 0.9 + (session.worker + 1) * 0.01 * total
        training.step += 1
    return {"own": training.own.tolist(), "restored_from": training.restored_from}


def test_a_step_that_cannot_be_done_again_restarts_all_workers_from_their_own_snapshots(tmp_path):
    (tmp_path / "calm").mkdir()
    calm = run_body(lambda session: add_up(session, tmp_path / "calm", is_calm=True), snapshot_s=None)
    assert calm.outcome.exit_code == 0, calm.said
    told = run_body(lambda session: add_up(session, tmp_path))
    assert told.outcome.exit_code == 0, (told.said, told.outcome.failure)
    (line,) = [line for line in told.said if "restart" in line]
    assert re.fullmatch(
        r"worker 1 \(cpu:0/v1\) was lost at step 41, which cannot be done again; all workers restart from the snapshot"
        r" in memory of step 37 \(\d+\.\d s of training are repeated\)\.",
        line,
    ), line
    assert [told.results[worker]["restored_from"] for worker in (0, 1)] == [37, 37]
    own = [[results[worker]["own"] for worker in (0, 1)] for results in (calm.results, told.results)]
    assert own[0] == own[1] and own[0][0] != own[0][1]
