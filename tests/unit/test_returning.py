"""Whether a run goes back once more, and what it leaves out of what lies there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from duoka.runtime import returning
from duoka.runtime.decisions import WayBack
from duoka.runtime.returning import Returns


@pytest.fixture
def said() -> list[str]:
    return []


def save(directory: Path, *steps: int) -> None:
    for step in steps:
        (directory / f"step-{step:08}").mkdir()


def test_what_was_saved_after_the_last_agreed_step_is_moved_aside_and_the_rest_is_gone_back_to(tmp_path, said):
    save(tmp_path, 2, 4, 6, 7)
    assert Returns(said.append).clear(WayBack("They differ", str(tmp_path), agreed_step=4))
    assert sorted(os.listdir(tmp_path)) == ["set-aside-1", "step-00000002", "step-00000004"]
    assert "step-00000006, step-00000007 moved to" in said[0]
    assert (
        said[1]
        == "They differ; all workers start anew, and go back to the checkpoint of step 4 (1 of at most 3 times)."
    )


def test_a_run_that_does_not_go_back_leaves_no_suspects_for_whoever_starts_it_again(tmp_path, said):
    save(tmp_path, 4, 6)
    assert not Returns(said.append).clear(WayBack("They differ", str(tmp_path), is_wanted=False, agreed_step=4))
    assert sorted(os.listdir(tmp_path)) == ["set-aside-1", "step-00000004"]
    assert len(said) == 1


def test_a_run_does_not_go_back_where_suspects_cannot_be_moved_aside(tmp_path, said, monkeypatch):
    def refuse(*given):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(returning, "move_aside", refuse)
    assert not Returns(said.append).clear(WayBack("They differ", str(tmp_path), agreed_step=4))
    (line,) = said
    assert "could not be moved aside (Read-only file system): move them away" in line


def test_replicas_that_differ_go_back_again_only_once_they_have_agreed_later(tmp_path, said):
    returns = Returns(said.append)
    answers = [returns.clear(WayBack("They differ", str(tmp_path), agreed_step=step)) for step in (4, 8, 8)]
    assert answers == [True, True, False]
    assert said[-1].startswith("They differ; they have not been equal at a later step since this happened before")


def test_a_loss_between_two_differences_changes_nothing_of_that(tmp_path, said):
    returns = Returns(said.append)
    ways = [WayBack("They differ", str(tmp_path), agreed_step=4), WayBack("One was lost", str(tmp_path))]
    assert [returns.clear(way) for way in (*ways, ways[0])] == [True, True, False]
    assert [returns.clear(way) for way in (ways[1], ways[1])] == [True, False]  # three in all
