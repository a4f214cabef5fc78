"""Workers killed inside plain calls: what needs nothing of the dead goes on, what does is lost on all survivors.

Nobody comes back with half a value, and nobody waits for the dead. A worker dies at a moment of the protocol, or in
the middle of an announcement, when one of the others has heard it and the rest have not.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from duoka.collectives.staging import SLOT_BYTES
from duoka.errors import DuokaError
from tests.conftest import run_workers

ROUNDS = 3  # in which the values of gathers and broadcasts travel here
SIZES = {"small": 500, "large": 60_000}  # floats: one meeting, or two with the work shared by slices
MOMENTS_OF_LARGE = ["depositing", "arriving", "arrived", "reducing", "reduced", "completed"]


@dataclass(frozen=True)
class Strike:
    """Kill this worker at its n-th moment, or in the middle of its n-th announcement, counted from when it is armed.

    It dies once the others have done what they can without it, so that a story has one end: they have completed what
    it has completed, and the one who hears the announcement completes the call with it.
    """

    worker: int
    moment: int | None = None
    announcement: int | None = None
    completes_call: bool = True

    def arm(self, collective) -> None:
        if collective.worker != self.worker:
            return
        meeting = collective.meeting
        if self.moment is not None:

            def die_at(name: str) -> None:
                # In the moment "completed" it has told all others that they can complete the call, too.
                call = meeting._board.read(self.worker).begun if name == "completed" else meeting.completed
                _wait_until_completed(meeting, [w for w in collective.workers if w != self.worker], call)
                die()

            collective.moment = _after(self.moment, die_at)
        if self.announcement is not None:
            send = meeting._mailbox.send

            def send_to_one(receivers, message) -> None:
                hearer = next(iter(receivers))
                send([hearer], message)
                if self.completes_call:
                    _wait_until_completed(meeting, [hearer], call=message.progress >> 2)
                die()

            meeting._mailbox.send = _after(self.announcement, send_to_one, before=send)


def _wait_until_completed(meeting, workers: list[int], call: int) -> None:
    end = time.monotonic() + 5
    while min(meeting._board.read(worker).completed for worker in workers) < call and time.monotonic() < end:
        time.sleep(0.001)


def _after(count: int, strike: Callable[..., None], before: Callable[..., None] = lambda *_: None) -> Callable:
    calls = iter(range(count + 1))

    def call(*args: Any) -> None:
        (strike if next(calls) == count else before)(*args)

    return call


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(num_workers: int, body: Callable[..., Any], *args: Any, lost: set[int]) -> list[Any]:
    """What the survivors gave back, after these workers have really been killed."""
    launched = run_workers(num_workers, num_workers, body, *args, deadline_s=10.0)
    assert sorted(launched.outcome.lost) == [(worker, signal.SIGKILL) for worker in sorted(lost)]
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    survivors = sorted(set(range(num_workers)) - lost)
    assert sorted(launched.results) == survivors
    return [launched.results[worker] for worker in survivors]


def try_to(call: Callable[[], Any]) -> Any:
    """What a call gives, or the name of its error. Only ours are caught: a ValueError fails the test."""
    try:
        return call()
    except DuokaError as error:
        return type(error).__name__


everybody = pytest.mark.parametrize("victim", [0, 1, 2])


# Barriers.


def pass_barriers(collective, strike: Strike) -> int:
    collective.barrier()
    strike.arm(collective)
    for _ in range(4):
        collective.barrier()
    return collective.meeting.completed


@everybody
def test_survivors_pass_a_barrier_in_which_one_is_killed(victim):
    for which in range(3):
        assert run(3, pass_barriers, Strike(victim, moment=which), lost={victim}) == [5, 5]
        assert run(3, pass_barriers, Strike(victim, announcement=which), lost={victim}) == [5, 5]


def pass_a_barrier_in_which_two_die(collective) -> float:
    for number in range(6):
        if (number, collective.worker) in [(2, 1), (3, 3)]:
            die()
        collective.barrier()
    # Those who are left have agreed on who gives the values of the dead.
    return float(collective.all_reduce([np.float64(10**r) for r in collective.replicas]))


def test_survivors_of_barriers_add_up_the_values_of_all_replicas():
    assert run(4, pass_a_barrier_in_which_two_die, lost={1, 3}) == [1111.0, 1111.0]


# Gathers.


def gather_in_rounds(collective, strike: Strike) -> str:
    size = ROUNDS * SLOT_BYTES // 8
    collective.all_gather([np.full(size, -1.0) for _ in collective.replicas])  # what a torn value would show
    strike.arm(collective)
    values = [np.arange(size) + 1e6 * replica for replica in range(collective.num_replicas)]
    gathered = try_to(lambda: collective.all_gather([values[r] for r in collective.replicas]))
    if isinstance(gathered, str):
        return gathered
    return "whole" if all(map(np.array_equal, gathered, values)) else "torn"


@everybody
def test_a_gather_whose_giver_is_killed_before_it_is_heard_is_lost_on_all_survivors(victim):
    for which in range(ROUNDS):
        told = run(3, gather_in_rounds, Strike(victim, moment=which), lost={victim})
        assert told == ["WorkerLost", "WorkerLost"], f"round {which}"


@everybody
def test_a_gather_whose_giver_is_heard_by_one_survivor_is_lost_or_whole_on_all(victim):
    for which in range(ROUNDS):
        told = run(3, gather_in_rounds, Strike(victim, announcement=which), lost={victim})
        # After its last round the dead has given everything.
        assert told == ["whole" if which == ROUNDS - 1 else "WorkerLost"] * 2, f"round {which}"


# Broadcasts.


def broadcast_in_rounds(collective, strike: Strike) -> str:
    size = ROUNDS * collective.num_replicas * SLOT_BYTES // 8
    sends = 0 in collective.replicas
    collective.broadcast(np.full(size, -1.0) if sends else None)  # what a torn value would show
    strike.arm(collective)
    received = try_to(lambda: collective.broadcast(np.arange(size) if sends else None))
    if isinstance(received, str):
        return received
    return "whole" if np.array_equal(received, np.arange(size)) else "torn"


@pytest.mark.parametrize("victim", [1, 2])
def test_a_broadcast_reaches_the_survivors_while_its_sender_lives(victim):
    for which in range(ROUNDS):
        assert run(3, broadcast_in_rounds, Strike(victim, moment=which), lost={victim}) == ["whole"] * 2
        assert run(3, broadcast_in_rounds, Strike(victim, announcement=which), lost={victim}) == ["whole"] * 2


def test_a_broadcast_whose_sender_is_killed_before_it_is_heard_is_lost_on_all_survivors():
    for which in range(ROUNDS):
        assert run(3, broadcast_in_rounds, Strike(0, moment=which), lost={0}) == ["WorkerLost"] * 2, f"round {which}"


def test_a_broadcast_whose_sender_is_heard_by_one_survivor_is_lost_or_whole_on_all():
    for which in range(ROUNDS):
        told = run(3, broadcast_in_rounds, Strike(0, announcement=which), lost={0})
        assert told == ["whole" if which == ROUNDS - 1 else "WorkerLost"] * 2, f"round {which}"


def broadcast_from_an_heir(collective, victim: int) -> Any:
    collective.barrier()
    if collective.worker == 0:
        die()
    collective.barrier()  # here replica 0 goes to worker 1
    Strike(victim, moment=0).arm(collective)
    return try_to(lambda: collective.broadcast(np.full(2, 7.0) if 0 in collective.replicas else None).tolist())


@pytest.mark.parametrize("victim, told", [(3, [7.0, 7.0]), (2, [7.0, 7.0]), (1, "WorkerLost")])
def test_a_broadcast_from_an_inherited_replica_needs_only_the_heir(victim, told):
    assert run(4, broadcast_from_an_heir, victim, lost={0, victim}) == [told, told]


# Sums.


def add_up(collective, size: int) -> list[float]:
    total = collective.all_reduce([np.full(size, 10.0**replica) for replica in collective.replicas])
    return np.unique(total).tolist()


def add_up_after_a_strike(collective, size: int, strike: Strike) -> Any:
    collective.all_reduce([np.full(size, -1.0) for _ in collective.replicas])  # what a torn sum would show
    strike.arm(collective)
    return try_to(lambda: add_up(collective, size))


@everybody
def test_a_small_sum_is_lost_on_all_survivors_unless_one_has_heard_the_dead(victim):
    run_small = (3, add_up_after_a_strike, SIZES["small"])
    assert run(*run_small, Strike(victim, moment=0), lost={victim}) == ["WorkerLost"] * 2
    assert run(*run_small, Strike(victim, announcement=0), lost={victim}) == [[111.0]] * 2


@everybody
def test_a_large_sum_is_lost_on_all_survivors_until_the_dead_has_told_its_part(victim):
    run_large = (3, add_up_after_a_strike, SIZES["large"])
    for which, moment in enumerate(MOMENTS_OF_LARGE):
        told = run(*run_large, Strike(victim, moment=which), lost={victim})
        assert told == [[111.0] if moment == "completed" else "WorkerLost"] * 2, moment
    for which, said in enumerate(["arrived", "reduced", "taken"]):
        strike = Strike(victim, announcement=which, completes_call=said != "arrived")
        told = run(*run_large, strike, lost={victim})
        assert told == [[111.0] if strike.completes_call else "WorkerLost"] * 2, said


def name_moments(collective, size: int) -> list[str]:
    names: list[str] = []
    collective.moment = names.append
    add_up(collective, size)
    return names


def test_a_sum_passes_the_moments_at_which_these_tests_kill():
    for size, moments in (("small", ["arriving"]), ("large", MOMENTS_OF_LARGE)):
        assert run(3, name_moments, SIZES[size], lost=set()) == [moments] * 3


def assert_lost_on_all(told: list[Any]) -> None:
    assert told == ["WorkerLost"] * len(told), told


def add_up_twice(collective, size: int, strike: Strike) -> list[Any]:
    collective.barrier()
    strike.arm(collective)
    return [try_to(lambda: add_up(collective, size)) for _ in range(2)]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_worker_killed_between_two_large_sums_is_lost_in_the_second_which_nobody_gets(num_workers):
    """It has handed in its part, and not yet said that it took the result. Its replica has an heir by then."""
    total = [sum(10.0**replica for replica in range(num_workers))]
    for victim in range(num_workers):
        strike = Strike(victim, moment=MOMENTS_OF_LARGE.index("completed"))
        told = run(num_workers, add_up_twice, SIZES["large"], strike, lost={victim})
        assert [first for first, _ in told] == [total] * (num_workers - 1), f"worker {victim} was killed"
        assert_lost_on_all([second for _, second in told])


NEXT_CALLS = {
    "small_sum": lambda collective, dead: add_up(collective, SIZES["small"]),
    "large_sum": lambda collective, dead: add_up(collective, SIZES["large"]),
    "gather": lambda collective, dead: collective.all_gather([np.ones(3) for _ in collective.replicas]),
    "broadcast_of_the_dead": lambda collective, dead: collective.broadcast(np.ones(3), root=dead),
}


def pass_a_barrier_and_call(collective, call: str, strike: Strike) -> Any:
    collective.barrier()
    strike.arm(collective)
    collective.barrier()
    return try_to(lambda: NEXT_CALLS[call](collective, strike.worker))


@everybody
@pytest.mark.parametrize("call", NEXT_CALLS)
def test_a_worker_whose_last_call_one_survivor_has_heard_is_lost_in_the_next_which_nobody_gets(call, victim):
    """One survivor is in that next call when it learns of the death; for the other the dead has an heir there."""
    assert_lost_on_all(run(3, pass_a_barrier_and_call, call, Strike(victim, announcement=0), lost={victim}))


def try_again_and_again(collective, size: int) -> list[str]:
    collective.barrier()
    Strike(2, moment=0).arm(collective)
    told = [try_to(lambda: add_up(collective, size))]
    told += [try_to(lambda: add_up(collective, size)) for _ in range(2)]
    told += [try_to(collective.barrier)]
    return told


@pytest.mark.parametrize("size", list(SIZES))
def test_a_lost_sum_that_is_tried_again_is_lost_again_at_once(size):
    assert run(3, try_again_and_again, SIZES[size], lost={2}) == [["WorkerLost"] * 4] * 2


@pytest.mark.parametrize("size", list(SIZES))
def test_a_lost_sum_that_nobody_catches_ends_the_run_with_the_exit_code_of_the_dead(size):
    def body(collective):
        collective.barrier()
        Strike(2, moment=0).arm(collective)
        add_up(collective, SIZES[size])

    outcome = run_workers(3, 3, body).outcome
    assert outcome.lost == [(2, signal.SIGKILL)]
    assert outcome.exit_code == 137
    assert outcome.failed_worker in (0, 1) and outcome.failure["error"] == "WorkerLost"
    assert "worker 2 (cpu:0/v2) was lost in call 2 at step 0" in outcome.failure["traceback"]


# Calls that differ.


def call_something_else_and_die(collective) -> Any:
    Strike(2, announcement=0).arm(collective)
    if collective.worker == 2:
        collective.all_reduce([np.float32(5)])
    told = try_to(lambda: float(collective.all_reduce([np.float64(1)])))
    return [told, try_to(collective.barrier)]


def test_the_last_call_of_the_dead_is_compared_by_all_survivors_if_one_has_heard_it():
    assert run(3, call_something_else_and_die, lost={2}) == [["MismatchError", "MismatchError"]] * 2
