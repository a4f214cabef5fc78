"""Which deaths are of one batch's making, and which are just two losses."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from duoka.collectives.board import Board, Work, board_bytes
from duoka.errors import DeadlineExceeded, WorkerLost
from duoka.runtime.poison import Death, Deaths, MemoryShortage
from duoka.runtime.watching import Lost, Reading, Wait

SEGV, ABRT, KILL = signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL
HERE = Work(1204, 3, 4)


def note_all(*deaths: Death):
    """What the last of these deaths comes to; those before it must not end the run."""
    known = Deaths("worker {}".format)
    errors = [known.note(death) for death in deaths]
    assert errors[:-1] == [None] * (len(deaths) - 1)
    return errors[-1]


def test_two_crashes_for_the_same_replica_and_step_end_the_run_and_are_named():
    error = note_all(Death(3, SEGV, HERE), Death(0, ABRT, HERE))
    assert isinstance(error, WorkerLost) and error.exit_code == 128 + ABRT
    assert error.what == (
        "Replica 3 at step 1204 has ended two workers in turn: worker 3 by SIGSEGV, then worker 0 by SIGABRT."
    )


def test_the_exit_code_of_one_error_is_not_that_of_all():
    assert note_all(Death(3, SEGV, HERE), Death(0, ABRT, HERE)).exit_code == 134
    assert WorkerLost("x").exit_code == 1


@pytest.mark.parametrize(
    "first, second",
    [
        pytest.param(Death(3, KILL, HERE), Death(0, KILL, HERE), id="killed from outside"),
        pytest.param(Death(3, SEGV, HERE), Death(0, KILL, HERE), id="one of them from outside"),
        pytest.param(Death(3, SEGV, HERE), Death(0, SEGV, Work(1204, 2, 3)), id="another replica"),
        pytest.param(Death(3, SEGV, HERE), Death(0, SEGV, Work(1205, 3, 4)), id="another step"),
        pytest.param(Death(3, SEGV, Work(1204)), Death(0, SEGV, Work(1204)), id="outside of replicas"),
        pytest.param(Death(3, signal.SIGTERM, HERE), Death(0, signal.SIGTERM, HERE), id="asked to end"),
    ],
)
def test_unrelated_deaths_are_two_losses(first, second):
    assert note_all(first, second) is None


def test_the_second_crash_need_not_follow_at_once():
    assert note_all(Death(3, SEGV, HERE), Death(2, KILL, HERE), Death(0, SEGV, HERE)) is not None


def test_shares_that_hold_the_same_replica_count():
    assert note_all(Death(1, SEGV, Work(7, 2, 4)), Death(0, SEGV, Work(7, 0, 4))) is not None


def test_two_that_the_system_killed_for_want_of_memory_count():
    dead = [Death(worker, KILL, HERE, is_out_of_memory=True) for worker in (3, 0)]
    assert "worker 3 by SIGKILL, for want of memory" in note_all(*dead).what


def stuck(worker: int, since: float, died_at: float, *, step: int = 5, stack: str = '  File "a.py", line 3') -> Death:
    wait = Wait((worker,), True, since - 60, 60.0, step, "arrived", 1)
    lost = Lost(worker, wait, since, 60.0, Reading("S" if stack else "T", 5.0, stack))
    return Death(worker, KILL, Work(step), died_at, stuck=lost)


def test_two_that_were_stuck_in_the_same_place_one_after_the_other_end_the_run():
    error = note_all(stuck(0, 60, 120), stuck(1, 180, 240))
    assert isinstance(error, DeadlineExceeded) and error.exit_code == 75
    assert stuck(0, 60, 120).tell() == (
        "was stuck (no CPU time used, same stack for 60 s) while others waited, and was killed"
    )
    assert error.what == "Worker 0 and then worker 1 were stuck in the same place, at step 5."
    assert 'File "a.py", line 3' in error.why and "raise deadline_s" in error.do


def test_two_that_were_stuck_in_the_same_replica_end_the_run_wherever_they_were():
    before, after = stuck(0, 60, 120), stuck(1, 180, 240, stack='  File "b.py", line 9')
    assert note_all(replace(before, work=Work(5, 2, 3)), replace(after, work=Work(5, 2, 3))) is not None


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(stuck(1, 60, 120.5), id="at the same time"),
        pytest.param(stuck(1, 180, 240, stack='  File "b.py", line 9'), id="in another place"),
        pytest.param(stuck(1, 180, 240, step=6), id="at another step"),
        pytest.param(stuck(1, 180, 240, stack=""), id="stopped from outside"),
    ],
)
def test_two_that_were_stuck_for_reasons_of_their_own_are_two_losses(second):
    assert note_all(stuck(0, 60, 120), second) is None


def test_a_shortage_of_memory_is_new_when_the_systems_count_has_risen():
    counts = iter([4, 4, 5, 5])
    shortage = MemoryShortage(lambda: next(counts))
    assert [shortage.is_new() for _ in range(3)] == [False, True, False]


def test_what_a_worker_computes_is_read_as_it_was_written():
    board = Board(bytearray(board_bytes(3)))
    assert not board.read_work(1).is_under_way
    board.write(1, 4711, 8, 7, 6)
    for number in (8, 9):
        board.write_call(1, number, b"x" * 2000)
    board.write_work(1, Work.of(1204, (3, 5)))
    assert board.read_work(1) == Work(1204, 3, 6) and str(board.read_work(1)) == "replicas 3 to 5 at step 1204"
    assert (board.read(1).pid, board.read(1).steps) == (4711, 6)
    assert not board.read_work(0).is_under_way and not board.read_work(2).is_under_way
