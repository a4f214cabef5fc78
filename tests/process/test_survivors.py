"""Workers killed in `strategy.sum`, `.mean` and `.gather` between steps: the others go on, all with the same answer.

Either all of them have what the dead one gave, or none has, and then they say so.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from duoka.collectives.solo import solo
from duoka.collectives.survivors import add_up, gather
from duoka.runtime.worker import attachment
from duoka.session import WorkerSession
from duoka.strategies.mirrored import Mirrored
from tests.conftest import die_at, run_workers

SIZES = {"one": (), "small": (500,), "large": (60_000,)}  # pieces: 60,000 are four
LONG = 300_000  # bytes: several pieces


def strategy_of(collective) -> Mirrored:
    session = WorkerSession(attachment().plan, collective.worker, collective)
    Mirrored.connect = staticmethod(lambda request: session)
    return Mirrored()


def agree(launched, victim: int, num_workers: int) -> Any:
    """What all survivors have got."""
    assert launched.outcome.lost == [(victim, signal.SIGKILL)], launched.outcome
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    assert len(launched.results) == num_workers - 1
    first, *others = launched.results.values()
    assert all(other == first for other in others), launched.results
    return first


def sum_up(collective, shape: tuple[int, ...], victim: int, moment: int) -> list:
    collective.barrier()
    if collective.worker == victim:
        die_at(collective, moment)
    own = {replica: np.full(shape, 10.0**replica) for replica in collective.own_replicas}
    known = add_up(collective, own, dict.fromkeys(own), is_mean=False)
    collective.barrier()
    more = add_up(
        collective, {r: np.ones(shape) for r in collective.own_replicas}, dict.fromkeys(range(4)), is_mean=False
    )
    return [np.unique(known.value).tolist(), list(known.lost), np.unique(more.value).tolist()]


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("victim", [0, 2])
def test_a_sum_has_what_the_dead_one_gave_on_all_survivors_or_on_none(size, victim):
    told = []
    for moment in (0, 3, 6, 9, 13, 16, 19) if size == "large" else range(5):
        total, lost, after = agree(run_workers(3, 3, sum_up, SIZES[size], victim, moment), victim, 3)
        assert total == [111.0 if not lost else 111.0 - 10**victim] and lost in ([], [victim]), moment
        assert after == [3.0], "later calls are whole again: the replicas of the dead have new owners"
        told.append(bool(lost))
    assert told[0] and not told[-1], "it died before its value was known, and after"


def gather_long(collective, length: int, victim: int, moment: int) -> list:
    collective.barrier()
    if collective.worker == victim:
        die_at(collective, moment)
    own = {replica: bytes([replica + 1]) * (length + replica) for replica in collective.own_replicas}
    found = gather(collective, own, "of a test")
    return [None if data is None else [len(data), sorted(set(data))] for data in found]


@pytest.mark.parametrize("length", [10, LONG])
@pytest.mark.parametrize("victim", [0, 1])
def test_gathered_values_are_whole_or_left_out_on_all_survivors(length, victim):
    moments = (0, 1, 2, 3) if length == 10 else (0, 3, 7, 11, 15)
    told = []
    for moment in moments:
        found = agree(run_workers(3, 4, gather_long, length, victim, moment), victim, 3)
        whole = [[length + replica, [replica + 1]] for replica in range(4)]
        missing = [replica for replica, value in enumerate(found) if value is None]
        assert [value if found[r] is not None else None for r, value in enumerate(whole)] == found, moment
        assert missing in ([], [0, 1] if victim == 0 else [2]), moment
        told.append(bool(missing))
    assert told[0]


def test_long_values_are_gathered_whole_by_one_worker():
    alone = solo(5, available_bytes=lambda: 2**40)
    given = {replica: os.urandom(LONG * (replica % 2)) for replica in range(5)}
    assert gather(alone, given, "of a test") == list(given.values())


def count_between_steps(collective, victim: int) -> list:
    """The victim dies before it calls: nobody has its values."""
    strategy = strategy_of(collective)
    strategy.barrier()
    if collective.worker == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return [
        float(strategy.sum(1.0)),
        float(strategy.mean(float(collective.worker), 2)),
        [value.tolist() for value in strategy.gather(np.full(2, collective.worker))],
    ]


def test_a_run_goes_on_without_the_numbers_of_a_lost_worker_and_says_so(capfd):
    total, mean, values = agree(run_workers(3, 3, count_between_steps, 1), 1, 3)
    assert total == 2.0
    assert mean == 1.0 and values[0] == [0, 0] and values[-1] == [2, 2]
    assert "strategy.sum goes without replica 1: lost with a worker" in capfd.readouterr().err
