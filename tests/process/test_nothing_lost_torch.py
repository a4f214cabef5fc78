"""Workers of a PyTorch training killed at any moment: the survivors end with the bits of an undisturbed run.

`python -m tests.process.soak --replay torch SEED` tells the story of one seed again.
"""

from __future__ import annotations

import pytest
import torch

from tests.process.strikes import Strike
from tests.process.torch_chaos import STEPS, Story, check, write_story

pytestmark = [pytest.mark.torch]
PHASES = ["depositing", "arriving", "arrived", "reducing", "reduced", "completed"]


@pytest.fixture(scope="module", autouse=True)
def optimizers_are_loaded():
    """What the first optimizer of a process imports takes seconds: once here, and not in every fork."""
    torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=1)


def check_seed(seed: int) -> None:
    try:
        check(write_story(seed))
    except AssertionError as error:
        raise AssertionError(f"python -m tests.process.soak --replay torch {seed}\n{error}") from error


@pytest.mark.parametrize("seed", range(5))
def test_workers_killed_at_random_moments_change_no_bit(seed):
    check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(9))
def test_workers_killed_at_random_moments_change_no_bit_in_many_stories(block):
    for seed in range(5 + 5 * block, 10 + 5 * block):
        check_seed(seed)


@pytest.mark.parametrize(
    ("place", "victim"), [("start", 0), ("before prepare", 2), ("arriving", 0), ("evaluation", 0), ("end", 3)]
)
def test_a_worker_killed_before_between_or_after_steps_changes_no_bit(place, victim):
    """The first time that somebody is "arriving", models are compared."""
    check(Story((Strike(victim, at_place=place),)))


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(4))
def test_any_worker_killed_before_between_or_after_steps_changes_no_bit(victim):
    for place in ("start", "before prepare", "depositing", "arriving", "arrived", "completed", "evaluation", "end"):
        check(Story((Strike(victim, at_place=place),)))


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_killed_at_each_phase_of_the_exchange_changes_no_bit_and_applies_the_step_once(phase):
    check(Story((Strike(1, at_place=phase, n=4),), "large"))


@pytest.mark.parametrize("calls", [0, 40])
def test_a_worker_killed_during_the_update_changes_no_bit_and_applies_the_step_once(calls):
    check(Story((Strike(0, at_place="update", n=6, calls=calls),)))


def test_two_workers_killed_at_once_change_no_bit():
    check(Story((Strike(0, at_place="arriving", n=7), Strike(3, at_place="arriving", n=7)), "large"))


def test_a_second_worker_killed_during_recovery_changes_no_bit():
    """The second one dies when it has begun to compute what the first one has left."""
    check(Story((Strike(1, at_place="function", n=6), Strike(2, at_place="function", n=7, calls=30))))


def test_all_workers_but_one_killed_change_no_bit():
    check(Story(tuple(Strike(worker, at_place="function", n=4 + worker) for worker in (0, 1, 2))))


def test_the_last_step_is_not_lost():
    check(Story((Strike(2, at_place="batch", n=STEPS - 1),)))
