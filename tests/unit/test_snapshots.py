"""Snapshots in memory: what counts as complete, when one is taken, and what a training is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from duoka.checkpoint import memory_snapshot
from duoka.checkpoint.codec import NumpyCodec
from duoka.checkpoint.memory_snapshot import Entry, SnapshotFiles, SnapshotMemory
from duoka.runtime.decisions import WayBack
from duoka.runtime.plan import Plan
from duoka.runtime.returning import Returns
from duoka.strategies.borders import Borders
from duoka.strategies.snapshots import Snapshots
from tests.conftest import plan_for, remains

WORKERS = 2


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    before = remains().descriptors
    made = SnapshotMemory(WORKERS)
    yield made
    made.close()
    assert remains().descriptors == before


def files_of(memory: SnapshotMemory, worker: int, free: int = 1 << 40) -> SnapshotFiles:
    return SnapshotFiles(memory.descriptors_of(worker), worker, WORKERS, lambda: free)


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Collective:
    """One worker of two, of which the first one is the main one."""

    def __init__(self, worker: int, word: Any) -> None:
        self.worker, self.workers, self.main, self._word = worker, (0, 1), 0, word

    def common(self, nbytes: int) -> Any:
        return self._word


class Training:
    can_be_snapshotted = True
    every_worker_keeps_its_state = False

    def __init__(self, cost_s: float = 0.0, time: Time | None = None) -> None:
        self.step = self.batch = 0
        self._cost_s, self._time = cost_s, time
        self.restored: dict[str, Any] = {}

    def capture(self) -> dict[str, Any]:
        if self._time is not None:
            self._time.now += self._cost_s
        return {"step": self.step, "weights": np.full(1000, float(self.step))}

    def restore(self, state: dict[str, Any]) -> None:
        self.restored = state


class Run:
    """Two workers, step by step, on one clock."""

    def __init__(self, memory: SnapshotMemory, cost_s: float = 0.0, free: int = 1 << 40) -> None:
        self.memory, self.time, self.said = memory, Time(), []
        word = np.zeros(8, np.uint8)
        self.trainings = [Training(cost_s if worker == 0 else 0.0, self.time) for worker in range(WORKERS)]
        self.borders = [Borders() for _ in range(WORKERS)]
        self.snapshots = [
            Snapshots(
                Collective(worker, word),  # type: ignore[arg-type]
                files_of(memory, worker, free),
                self.borders[worker],
                lambda: [NumpyCodec()],
                self.said.append,
                clock=self.time,
            )
            for worker in range(WORKERS)
        ]

    def train(self, num_steps: int, step_s: float = 1.0, order: tuple[int, ...] = (0, 1)) -> list[int]:
        """Returns the steps of the snapshots that were complete after some of these steps."""
        found = []
        for _ in range(num_steps):
            for worker in order:
                self.snapshots[worker].at_border(self.trainings[worker])  # type: ignore[arg-type]
            if (newest := self.memory.ledger.newest()) is not None and newest.step not in found:
                found.append(newest.step)
            for training in self.trainings:
                training.step += 1
                training.batch += 1
            self.time.now += step_s
        return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_small_state_is_kept_soon_after_the_first_step_and_then_every_ten_seconds(memory, order):
    found = Run(memory).train(40, order=order)
    assert found == [2, 13, 24, 35]  # named a batch ahead


def test_at_most_a_hundredth_of_the_time_goes_into_snapshots(memory):
    run = Run(memory, cost_s=0.5)
    begin = run.time.now
    found = run.train(500)
    assert 3 <= len(found) <= 0.01 * (run.time.now - begin) / 0.5 + 1


def test_each_worker_keeps_its_own_state_where_the_training_says_so(memory):
    run = Run(memory)
    for training in run.trainings:
        training.every_worker_keeps_its_state = True
    assert run.train(5) == [2]
    newest = memory.ledger.newest()
    assert newest is not None and newest.num_parts == 2
    memory.ledger.void(1, 0)
    assert memory.ledger.newest() is None, "one part is missing"


def test_a_start_after_a_loss_continues_from_the_newest_snapshot(memory):
    Run(memory).train(20)
    again = Run(memory)
    assert [borders.restart_step for borders in again.borders] == [13, 13]
    for snapshots, training in zip(again.snapshots, again.trainings, strict=True):
        snapshots.resume(training)  # type: ignore[arg-type]
        assert training.restored["step"] == 13 and training.restored["weights"][0] == 13.0
        training.restored = {}
        snapshots.resume(training)  # type: ignore[arg-type]
        assert not training.restored, "a second loop begins where it begins"
    assert len(again.said) == 1 and again.said[0].startswith("resumed from the snapshot in memory of step 13 (0.0 s).")


def test_a_new_main_worker_waits_as_long_as_the_one_before_would_have(memory):
    run = Run(memory)
    run.train(14)
    for snapshots in run.snapshots:
        snapshots._collective.main = 1  # type: ignore[misc]
    assert run.train(20) == [13, 24]


def test_a_checkpoint_of_a_later_step_goes_first(memory):
    Run(memory).train(20)
    again = Run(memory)
    again.borders[0].restart_step = None  # `strategy.checkpoint` has found it
    again.snapshots[0].resume(again.trainings[0])  # type: ignore[arg-type]
    assert not again.trainings[0].restored


def test_trainings_that_cannot_be_snapshotted_and_second_ones_are_left_alone(memory):
    run = Run(memory)
    run.trainings[0].can_be_snapshotted = run.trainings[1].can_be_snapshotted = False
    assert run.train(30) == []
    for training in run.trainings:
        training.can_be_snapshotted = True
    assert len(run.train(15)) == 2
    run.trainings = [Training(), Training()]
    assert len(run.train(30)) == 1, "what was kept stays"


def test_too_little_memory_is_logged_once_and_training_goes_on(memory):
    run = Run(memory, free=1000)
    assert run.train(40) == []
    assert run.said == ["no more snapshots in memory are taken: 0 MB of memory for one cannot be had, 0 MB are free"]


def test_what_cannot_be_saved_is_logged_once_and_older_snapshots_stay(memory):
    run = Run(memory)
    assert run.train(5) == [2]
    for training in run.trainings:
        training.capture = lambda: {"thing": object()}  # type: ignore[method-assign]
    assert run.train(40) == [2] and len(run.said) == 1 and "which cannot be saved" in run.said[0]


def test_an_error_in_an_object_of_the_script_does_not_end_the_run(memory):
    run = Run(memory)
    for training in run.trainings:
        training.capture = lambda: {}["missing"]  # type: ignore[method-assign]
    assert run.train(40) == [] and run.said == ["no more snapshots in memory are taken: KeyError: 'missing'"]


# The memory.


def test_a_writer_that_stops_in_the_middle_leaves_the_older_snapshot(memory, monkeypatch):
    files = files_of(memory, 0)
    for boundary in (3, 5):
        files.write(0, Entry(boundary, boundary, 1, 0.0), {"a": boundary}, {})
    parts = memory_snapshot.list_parts

    def stop_in_the_middle(*given: Any) -> Any:
        yield from list(parts(*given))
        raise KeyboardInterrupt

    monkeypatch.setattr(memory_snapshot, "list_parts", stop_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        files.write(0, Entry(7, 7, 1, 0.0), {"a": 7}, {})
    newest = memory.ledger.newest()
    assert newest is not None and newest.step == 5


def test_nothing_is_written_over_the_newest_complete_snapshot_while_a_part_of_a_later_one_is_missing(memory):
    first, second = (files_of(memory, worker) for worker in range(WORKERS))
    first.write(0, Entry(3, 3, 2, 0.0), {}, {})
    second.write(1, Entry(3, 3, 2, 0.0), {}, {})
    for boundary in (5, 7, 9):
        first.write(0, Entry(boundary, boundary, 2, 0.0), {}, {})
        newest = memory.ledger.newest()
        assert newest is not None and newest.boundary == 3
    second.write(1, Entry(9, 9, 2, 0.0), {}, {})
    newest = memory.ledger.newest()
    assert newest is not None and newest.boundary == 9


def test_snapshots_after_the_last_step_at_which_replicas_agreed_do_not_count(memory):
    files = files_of(memory, 0)
    for boundary in (3, 5):
        files.write(0, Entry(boundary, boundary, 1, 0.0), {}, {})
    memory.ledger.void_after(4)
    newest = memory.ledger.newest()
    assert newest is not None and newest.step == 3


def test_a_smaller_state_after_a_larger_one_is_read_as_it_is(memory):
    files = files_of(memory, 0)
    for boundary in range(1, 5):
        files.write(0, Entry(boundary, boundary, 1, 0.0), {"a": "x" * (10_000 // boundary)}, {})
        newest = memory.ledger.newest()
        assert newest is not None
        with files.open(0, newest) as file:
            assert os.fstat(file.fileno()).st_size == newest.nbytes


# The supervisor.


def test_starts_that_come_further_are_not_counted():
    said: list[str] = []
    returns = Returns(said.append)
    steps = (4, 4, 9, 9, 9, 9)
    ways = [WayBack("All were lost", "", snapshot=Entry(step, step, 1, 1.0), lost_at=2.5) for step in steps]
    assert [returns.clear(way) for way in ways] == [True, True, True, True, True, False]
    assert said[0] == (
        "All were lost; all workers restart from the snapshot in memory of step 4 (1.5 s of training are repeated)."
    )
    assert said[-1] == (
        "All were lost; it has started 3 times from step 9, and has come to no later snapshot, and the run ends."
    )


def test_snapshots_are_taken_only_where_lost_workers_are_replaced_and_there_are_several():
    def plan(workers: int, **fields: Any) -> Plan:
        return Plan(plan_for(workers, 2).devices, 2, 1, **fields)

    assert plan(2, snapshot_s=10.0, respawn=True).takes_snapshots
    assert not plan(1, snapshot_s=10.0, respawn=True).takes_snapshots
    assert not plan(2, snapshot_s=10.0).takes_snapshots
    assert not plan(2, respawn=True).takes_snapshots
