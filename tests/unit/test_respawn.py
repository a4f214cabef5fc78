"""New workers in the place of lost ones: the supervisor's decisions, without any process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from duoka.runtime.respawn import Respawn
from duoka.topology.membership import Membership


@dataclass
class Newcomer:
    number: int
    pid: int
    failure: dict[str, Any] | None = None


@dataclass
class Scene:
    """A run of four workers, of which worker 3 is lost and has a newcomer in its place."""

    membership: Membership = field(default_factory=lambda: Membership(0, (0, 1, 2, 3)))
    told: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    started: list[Newcomer] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.respawn = Respawn(self, self.said.append, lambda: self.now, is_wanted=True)
        self.respawn.on_message(0, None, {"kind": "joinable", "reason": ""})
        self.lose(3)

    def lose(self, number: int, *, is_own_doing: bool = False) -> None:
        self.membership = self.membership.lose({number})
        self.respawn.on_lost(number, is_own_doing=is_own_doing)
        self.respawn.fill()

    def start_newcomer(self, number: int) -> Newcomer:
        self.started.append(Newcomer(number, 1000 + len(self.started)))
        return self.started[-1]

    def tell_member(self, number: int, message: dict[str, Any]) -> None:
        self.told.append((number, message))

    def tell_newcomer(self, newcomer: Newcomer, message: dict[str, Any]) -> None:
        self.told.append((newcomer.number, message))

    def admit(self, newcomer: Newcomer, membership: Membership) -> None:
        self.membership = membership

    def describe(self, number: int) -> str:
        return f"worker {number}"

    def offer(self) -> None:
        newcomer = self.started[0]
        self.respawn.on_message(newcomer.number, newcomer, {"kind": "ready", "records": 0})

    def come_to_border(self, *members: int, offer: int = 1) -> None:
        facts = {"offer": offer, "generation": self.membership.generation, "deadline_s": 1.0, "facts": {}}
        for member in members:
            self.respawn.on_message(member, None, {"kind": "border", "completed": 9, "steps": 7, "step": 5} | facts)

    def hear_given(self, giver: int, reason: str = "") -> None:
        self.respawn.on_message(giver, None, {"kind": "given", "offer": 1, "reason": reason})

    def asked_to_give(self) -> list[int]:
        return [member for member, message in self.told if message["kind"] == "give"]


@pytest.fixture
def scene(monkeypatch) -> Scene:
    made = Scene()
    monkeypatch.setattr(os, "kill", lambda pid, number: made.killed.append(pid))
    return made


def test_one_that_has_not_come_to_a_border_at_which_others_stand_is_awaited(scene):
    scene.offer()
    assert scene.respawn.list_awaited() == set()
    scene.come_to_border(0, 2)
    assert scene.respawn.list_awaited() == {1}


def test_one_that_hands_over_its_state_is_awaited_until_it_has(scene):
    """Nobody else could be blamed if it hangs there, and the whole run would end for it."""
    scene.offer()
    scene.come_to_border(0, 1, 2)
    assert scene.asked_to_give() == [0] and scene.respawn.list_awaited() == {0}
    scene.hear_given(0)
    assert scene.respawn.list_awaited() == set()


def test_the_next_one_hands_over_its_state_when_the_first_was_killed_from_outside(scene):
    scene.offer()
    scene.come_to_border(0, 1, 2)
    scene.lose(0)
    scene.come_to_border(1, 2)
    assert scene.asked_to_give() == [0, 1] and scene.killed == []


def test_that_a_run_has_ended_before_a_worker_had_joined_again_is_said_once(scene):
    scene.respawn.finish()
    scene.respawn.finish()
    scene.respawn.on_gone(scene.started[0], "was ended by SIGKILL")
    assert scene.said[1:] == ["the run ended before worker 3 had joined again."]
    assert scene.killed == [scene.started[0].pid] * 2


def test_a_run_that_is_stopped_says_nothing_of_those_that_were_to_join(scene):
    scene.respawn.end()
    scene.respawn.finish()
    assert len(scene.said) == 1, "that worker 3 is started again"


def lose_givers(scene: Scene, *givers: int, is_own_doing: bool) -> list[str]:
    """What is said after these were lost, one after the other, while they handed over their state."""
    scene.offer()
    for giver in givers:
        scene.come_to_border(*scene.membership.workers)
        assert scene.asked_to_give()[-1] == giver
        scene.said.clear()
        scene.lose(giver, is_own_doing=is_own_doing)
    newcomer = scene.started[0]
    assert scene.killed == [newcomer.pid]
    scene.respawn.on_gone(newcomer, "was ended by SIGKILL")
    scene.come_to_border(2)
    assert scene.told[-1] == (2, {"kind": "refused", "offer": 1})
    return [line for line in scene.said if line.startswith("worker 3 ")]


def test_one_that_dies_of_handing_over_its_state_is_not_followed_by_others(scene):
    """Memory that runs out, or native code that crashes there, would end one member after the other."""
    (line,) = lose_givers(scene, 0, is_own_doing=True)
    assert line == (
        "worker 3 could not join: worker 0 was lost while it handed over the state of this run;"
        " the run goes on without it."
    )


def test_two_that_are_lost_while_they_hand_over_their_state_are_enough(scene):
    (line,) = lose_givers(scene, 0, 1, is_own_doing=False)
    assert "worker 1 was lost while it handed over" in line


def test_a_state_that_cannot_be_handed_over_is_one_line(scene):
    scene.offer()
    scene.come_to_border(0, 1, 2)
    scene.said.clear()
    scene.hear_given(0, "OutOfMemory: 80 MB of memory for it cannot be had, 3 MB are free.")
    scene.respawn.on_gone(scene.started[0], "was ended by SIGKILL")
    (line,) = scene.said
    assert line.startswith("worker 3 could not join: the state of this run cannot be handed over (OutOfMemory: 80 MB")
    assert len(scene.started) == 1 and scene.respawn.list_awaited() == set()


def test_a_newcomer_that_finishes_its_script_without_joining_is_not_started_again(scene):
    scene.said.clear()
    scene.respawn.on_gone(scene.started[0], "exited with code 0", has_finished=True)
    (line,) = scene.said
    assert line == "worker 3 has come to the end of its script before it had joined; the run goes on without it."
    assert len(scene.started) == 1


def test_a_newcomer_joins_at_a_step_as_the_user_counts(scene):
    scene.offer()
    scene.come_to_border(0, 1, 2)
    scene.hear_given(0)
    scene.respawn.on_message(3, scene.started[0], {"kind": "settled", "offer": 1})
    assert scene.said[-1] == (
        "worker 3 has rejoined at step 5; 4 workers go on (generation 2)."
        " Of the script's own variables it has those that are registered (strategy.register)."
    )
    assert scene.told[-1][1]["steps"] == 7, "the workers count those of the collective"


def test_a_newcomer_that_is_not_ready_after_the_deadline_is_mentioned_once(scene):
    scene.said.clear()
    assert scene.respawn.next_due() == scene.now + 60
    scene.now += 61
    for _ in range(2):
        scene.respawn.see_to_late()
    (line,) = scene.said
    assert line.startswith("worker 3 was started again 60 s ago, and has not come to where it could join")
    assert scene.respawn.next_due() is None and scene.killed == []


def test_a_newcomer_that_was_ready_in_time_is_not_mentioned(scene):
    scene.offer()
    scene.said.clear()
    scene.now += 61
    scene.respawn.see_to_late()
    assert scene.said == [] and scene.respawn.next_due() is None


def test_a_newcomer_waits_from_its_offer_until_somebody_comes_to_a_border(scene):
    assert scene.respawn.waits_since() is None
    scene.offer()
    scene.now += 5
    assert scene.respawn.waits_since() == 100
    scene.come_to_border(0)
    assert scene.respawn.waits_since() is None
    scene.come_to_border(1, 2)
    assert scene.respawn.is_given_since() == 105
    scene.hear_given(0)
    assert scene.respawn.is_given_since() is None


def test_a_worker_that_is_removed_twice_for_the_same_reason_is_not_started_again(scene):
    for reason in ("bits", "calls"):
        scene.respawn.on_lost(2, removed_for=reason)
        scene.respawn.fill()
    assert [newcomer.number for newcomer in scene.started] == [3, 2, 2]
    scene.respawn.on_lost(2, removed_for="calls")
    scene.respawn.fill()
    assert len(scene.started) == 3
    assert scene.said[-1].startswith("worker 2 was removed 2 times for the same reason, and is not started again.")
    assert "state = strategy.register(name=value)" in scene.said[-1]
