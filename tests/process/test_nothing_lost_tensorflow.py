"""Workers of a TensorFlow loop, killed at random moments: the bits are those of an undisturbed run.

`python -m tests.process.soak --replay loop-tensorflow SEED` tells the story of one seed again.
"""

from __future__ import annotations

import pytest

from tests.process.test_nothing_lost_keras import check, choose_strikes

pytestmark = [pytest.mark.tensorflow]
KIND = "loop-tensorflow"


@pytest.mark.slow
def test_a_worker_killed_at_a_random_moment_of_a_loop_changes_no_bit():
    check(KIND, 2, choose_strikes(KIND, 0, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_three_of_four_workers_killed_at_random_moments_of_three_loops_change_no_bit(seed):
    check(KIND, 4, choose_strikes(KIND, seed, 3, 4))
