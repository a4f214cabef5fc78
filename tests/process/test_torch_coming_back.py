"""PyTorch scripts whose workers are killed from outside and come back, with everything as it is by default.

`python -m tests.process.soak --replay torch-join SEED` tells the story of one seed again.
"""

from __future__ import annotations

import time

import pytest

from tests.process.torch_join_chaos import begin, check, finish, kill, reference, write_story

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("seed", range(5))
def test_workers_killed_from_outside_come_back_and_change_no_bit(seed):
    check(write_story(seed))


def test_a_run_whose_last_worker_is_lost_while_others_start_goes_back_to_its_checkpoint(tmp_path):
    run = begin("epochs,saves", 2, tmp_path)
    kept = tmp_path / "kept"
    (kept / "slowly").touch()
    run.wait_for("trains", timeout_s=90)
    end = time.monotonic() + 60
    while not list(kept.glob("saved/step-*")):
        assert time.monotonic() < end, run.err
        time.sleep(0.05)
    kill(run, 1)
    run.wait_for("worker 1 (cpu:0/v1) is started again", timeout_s=30)
    kill(run, 0)
    (kept / "slowly").unlink()
    ended = finish(run)
    assert ended.code == 0, ended.err
    (back,) = [line for line in ended.said() if "all workers start anew" in line]
    assert "no worker is left that others could join; all workers start anew, and go back to the checkpoint" in back
    assert ended.facts() == dict.fromkeys(range(2), reference(False))
