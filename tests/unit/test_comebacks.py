"""Whether the failure of a worker that has come back is its own, or one of the user's code that ends the run."""

from __future__ import annotations

import pytest

from duoka.collectives.board import Work
from duoka.runtime.comebacks import Comebacks

BETWEEN, WITHIN = Work(12), Work(12, 1, 2)
JOINED_AT = 10


@pytest.fixture
def comebacks() -> Comebacks:
    """Worker 2 has come back at step 10; workers 0 and 1 have been there all along."""
    made = Comebacks()
    made.add(2, generation=2, steps=JOINED_AT)
    return made


def test_what_it_raises_between_steps_is_its_own_at_any_time(comebacks):
    assert comebacks.stumbles(2, "TypeError", BETWEEN, 11, [0, 1])
    assert comebacks.stumbles(2, "TypeError", BETWEEN, 10_000, [0, 1])


def test_what_it_raises_within_a_step_is_its_own_until_it_has_run_as_many_steps_as_it_has_missed(comebacks):
    assert comebacks.stumbles(2, "TypeError", WITHIN, 2 * JOINED_AT - 1, [0, 1])
    assert not comebacks.stumbles(2, "TypeError", Work(20, 1, 2), 2 * JOINED_AT, [0, 1])


def test_one_that_has_missed_nothing_fails_like_any_other(comebacks):
    comebacks.add(2, generation=2, steps=0)
    assert not comebacks.stumbles(2, "TypeError", WITHIN, 0, [0, 1])


def test_a_second_failure_in_the_same_replica_and_step_is_the_users_error(comebacks):
    comebacks.add(1, generation=4, steps=JOINED_AT)
    assert comebacks.stumbles(2, "KeyError", WITHIN, 12, [0, 1])
    assert not comebacks.stumbles(1, "KeyError", WITHIN, 12, [0])
    assert comebacks.stumbles(1, "KeyError", Work(12, 0, 1), 12, [0])


@pytest.mark.parametrize("error", ["OSError", "ValueError", "RuntimeError", "MemoryError", "MyError"])
def test_what_does_not_come_from_something_missing_is_the_users_error_and_not_tried_again(comebacks, error):
    assert not comebacks.stumbles(2, error, WITHIN, 12, [0, 1])
    assert comebacks.stumbles(2, error, BETWEEN, 12, [0, 1]), "the others come by the same line"


def test_one_that_has_been_there_all_along_never_stumbles(comebacks):
    assert not comebacks.stumbles(0, "TypeError", BETWEEN, 12, [1, 2])


def test_when_nobody_older_is_left_it_is_the_users_error(comebacks):
    assert not comebacks.stumbles(2, "TypeError", BETWEEN, 12, [])
    comebacks.add(0, generation=4, steps=11)
    assert not comebacks.stumbles(2, "TypeError", BETWEEN, 12, [0])
    assert comebacks.stumbles(0, "TypeError", BETWEEN, 12, [2])


@pytest.mark.parametrize("error", ["WorkerLost", "DeadlineExceeded", "ReplicasDiffer"])
def test_what_happens_to_all_is_nobodys_own(comebacks, error):
    assert not comebacks.stumbles(2, error, BETWEEN, 12, [0, 1])
