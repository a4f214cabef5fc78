"""A worker takes the place of a lost one while the others train; kills at every moment of it change no bit."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from duoka.collectives.solo import solo
from duoka.collectives.values import decode, encode
from duoka.runtime.launch import Launched, launch
from duoka.runtime.worker import attachment
from duoka.session import _join
from tests.conftest import check_remains, plan_for, remains
from tests.limits import START_S
from tests.process.test_exactly_once import SIZES, gradient

STEPS, WAITS = 60, 10  # at step 10 the members wait until a newcomer is about to come, at 20 for a second one, ...


@dataclass(frozen=True)
class Strike:
    """Kill this worker when it comes by this moment for the n-th time, in its first life or a later one."""

    worker: int
    moment: str
    count: int = 1
    life: int = 1
    number: int = signal.SIGKILL


@dataclass(frozen=True)
class Story:
    num_workers: int
    num_replicas: int
    size: str
    strikes: tuple[Strike, ...]
    joins: int = 1  # how many newcomers are to join
    deadline_s: float = 20.0
    mistake: str = ""  # what a newcomer does otherwise than the first workers did
    overrun: int = 0  # how many steps more one that has come back wants to run
    leaves_in_s: float = 0.0  # how long that one takes to leave
    is_struck_then: bool = False  # worker 2 dies 0.3 s after it has begun to leave, before anybody has missed it
    is_compared: bool = True  # a junior computes a replica of an original worker, for comparison
    has_probation: bool = True  # before that it has no replica
    lacks_rows: bool = False  # all replicas, in every other step
    agrees_at: int = 0  # a step before which all workers find their weights equal
    deed: str = ""  # what one that has come back does otherwise than the others, three steps after it has joined


class State:
    """What a program would keep: a newcomer gets it from a living worker."""

    def __init__(self, size: str) -> None:
        self.step = 0
        self.applied = 0
        self.weights = np.zeros(SIZES[size], np.float32)

    def write(self, fd: int) -> None:
        data = encode({"step": self.step, "applied": self.applied, "weights": self.weights})
        assert os.write(fd, data) == len(data)

    def read(self, fd: int) -> None:
        state = decode(os.pread(fd, os.fstat(fd).st_size, 0))
        self.step, self.applied, self.weights = state["step"], state["applied"], state["weights"]


def train(collective, story: Story, directory: Path) -> dict:
    life = _begin_life(directory, collective.worker)
    mine = [strike for strike in story.strikes if strike.worker == collective.worker and strike.life == life]
    seen: dict[str, int] = {}

    def moment(name: str) -> None:
        seen[name] = seen.get(name, 0) + 1
        for strike in mine:
            if (strike.moment, strike.count) == (name, seen[name]):
                os.kill(os.getpid(), strike.number)

    collective.moment = moment
    collective.barrier()
    if life > 1 and story.mistake in ("another call", "an error"):
        (directory / f"ready-{collective.worker}-{life}").touch()
        collective.broadcast(np.zeros(2)) if story.mistake == "another call" else int("no number")
    float(collective.all_reduce([np.float64(1)] * len(collective.replicas)))
    state = State(story.size)
    buffers = [collective.buffer(SIZES[story.size], "f4", "weights"), collective.buffer(1, "i8", "applied")]
    joining = collective.joining
    if joining is not None:
        joining.allow()
        if story.has_probation:
            joining.require_probation()
    joined_at = STEPS
    shadowed: list[tuple[int, int]] = []
    num_own: dict[int, int] = {}  # replicas, by steps since this worker has joined
    was_main = False
    while state.step < STEPS + (life > 1) * story.overrun:
        if joining is not None:
            if joining.is_newcomer:
                (directory / f"ready-{collective.worker}-{life}").touch()
            elif state.step and state.step % WAITS == 0:
                _wait_for_newcomers(directory, min(story.joins, state.step // WAITS))
            is_newcomer = joining.is_newcomer
            joining.border(state.write, state.read)
            joined_at = state.step if is_newcomer else joined_at
            time.sleep(0.004)
        deed = story.deed if state.step == joined_at + 3 else ""
        if deed == "leaves":
            time.sleep(story.leaves_in_s)
            break
        if story.is_struck_then and state.step == joined_at + 2 and collective.worker == 1:
            (directory / "to leave").write_text(str(state.step + 1))
            (directory / "to leave").rename(directory / "leaving")  # whole, when others see it
        if story.is_struck_then and (directory / "leaving").exists():
            _be_struck_beside_one_that_leaves(collective.worker, state.step, directory)
        if deed == "exits":
            raise SystemExit(3)
        if deed == "raises between steps":
            int("no number")
        if deed == "calls something else":
            collective.barrier()
        moment(f"step {state.step}")
        was_main = was_main or collective.main == collective.worker
        num_own[state.step - joined_at] = len(collective.replicas)
        if story.agrees_at and state.step == story.agrees_at:
            collective.note_agreed()
        exchange = collective.exchange(buffers, f"of step {state.step}")
        if story.is_compared and collective.compares_juniors:
            exchange.compare_juniors()

        def place(replica: int, exchange=exchange, deed=deed) -> bytes:
            collective.work_on(state.step, (replica,))
            poison = directory / f"{state.step}-{replica}"
            if deed == "comes to a row that nobody can read":
                poison.touch()
            if deed == "raises in a step" or poison.exists():
                raise KeyError(f"nothing on worker {collective.worker}")
            is_other = life > 1 and story.mistake == "other numbers"
            shadowed.append((state.step, replica)) if exchange.is_shadow(replica) else None
            is_empty = story.lacks_rows and state.step % 2 == 0
            value = 0 if is_empty else gradient(replica, state.step, state.weights) + is_other
            exchange.slot(buffers[0], replica)[:] = value
            exchange.slot(buffers[1], replica)[:] = 0 if is_empty else 1 + state.step
            return b"%d/%d" % (state.step + (deed == "says something else"), replica)

        exchange.common_part = lambda note: note.partition(b"/")[0]
        exchange.carry_out(place)
        assert exchange.notes == [b"%d/%d" % (state.step, r) for r in range(collective.num_replicas)]
        state.weights -= np.float32(0.05) * exchange.result(buffers[0])
        state.applied += int(exchange.result(buffers[1])[0])
        state.step += 1
        collective.end_step()
    sha256 = hashlib.sha256(state.weights.tobytes()).hexdigest()
    facts = {"life": life, "shadowed": shadowed, "juniors": collective.juniors, "was_main": was_main}
    facts["num_own"] = [num_own.get(number, 0) for number in range(3)]  # in the first steps of a replacement
    return {"sha256": sha256, "applied": state.applied} | facts


def _be_struck_beside_one_that_leaves(worker: int, step: int, directory: Path) -> None:
    if worker != 1 and step == int((directory / "leaving").read_text()):
        time.sleep(0.3)
        if worker == 2 and len((directory / "lives-2").read_text()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.6)


def _begin_life(directory: Path, worker: int) -> int:
    lives = directory / f"lives-{worker}"
    with lives.open("a") as file:
        file.write("x")
    return lives.stat().st_size


def _wait_for_newcomers(directory: Path, num: int) -> None:
    end = time.monotonic() + START_S
    while len(list(directory.glob("ready-*"))) < num:
        assert time.monotonic() < end, "no newcomer has come"
        time.sleep(0.005)


def tell(story: Story, directory: Path) -> tuple[Launched, list[str]]:
    said: list[str] = []

    def in_worker() -> dict:
        attached = attachment()
        assert attached is not None
        return train(_join(attached).collective, story, directory)

    plan = replace(plan_for(story.num_workers, story.num_replicas, story.deadline_s), respawn=True)
    return launch(plan, in_worker, said.append), said


_calm: dict[tuple[int, str, bool], dict] = {}


def calm(num_replicas: int, size: str, directory: Path, lacks_rows: bool = False) -> dict:
    key = num_replicas, size, lacks_rows
    if key not in _calm:
        alone = solo(num_replicas, available_bytes=lambda: 2**40)
        _calm[key] = train(alone, Story(1, num_replicas, size, (), joins=0, lacks_rows=lacks_rows), directory)
    return _calm[key]


def check(story: Story, directory: Path, left: int | None = None, joined: int | None = None) -> list[str]:
    """All who finish have the bits of a calm run, and what was to happen has happened. Returns what was said."""
    (directory / "calm").mkdir(parents=True)
    expected = calm(story.num_replicas, story.size, directory / "calm", story.lacks_rows)
    before = remains()
    launched, said = tell(story, directory)
    check_remains(before, f"{story}: {said}")
    told = f"{story}: {launched.outcome} {said}"
    assert launched.outcome.exit_code == 0, told
    times_joined = sum("has rejoined at step" in line for line in said)
    assert times_joined >= 1 if joined == -1 else times_joined == (story.joins if joined is None else joined), told
    assert left == -1 or len(launched.results) == (story.num_workers if left is None else left), told
    for worker, result in launched.results.items():
        assert (result["sha256"], result["applied"]) == (expected["sha256"], expected["applied"]), f"{worker}: {told}"
    return said


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_newcomer_joins_and_the_bits_are_those_of_a_calm_run(size, victim, tmp_path):
    said = check(Story(3, 5, size, (Strike(victim, "step 3"),)), tmp_path)
    assert said[0] == f"worker {victim} (cpu:0/v{victim}) was ended by SIGKILL; 2 workers go on (generation 1)."
    assert said[1] == f"worker {victim} (cpu:0/v{victim}) is started again, and joins when it is ready."
    has = "Of the script's own variables it has those that are registered (strategy.register)."
    assert said[2].endswith(f"; 3 workers go on (generation 2). {has}")


def test_a_newcomer_joins_the_last_one_that_was_left(tmp_path):
    check(Story(2, 3, "large", (Strike(0, "step 3"),)), tmp_path)


def test_all_but_one_are_lost_and_come_back(tmp_path):
    check(Story(4, 5, "small", tuple(Strike(worker, "step 2") for worker in (0, 1, 3)), joins=3), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("moment", ["at the border", "giving", "given"])
def test_a_member_killed_while_another_one_joins_changes_no_bit(size, moment, tmp_path):
    for victim in (0, 1, 3) if moment == "at the border" else (0,):
        story = Story(4, 6, size, (Strike(2, "step 3"), Strike(victim, moment)), joins=2)
        said = check(story, tmp_path / str(victim))
        assert sum("was ended by SIGKILL" in line for line in said) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment, size",
    [
        ("giving", "small"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("giving", "large"), ("given", "small")]),
    ],
)
def test_a_member_stopped_while_it_hands_over_its_state_is_named_killed_and_replaced(moment, size, tmp_path):
    strikes = (Strike(2, "step 3"), Strike(0, moment, number=signal.SIGSTOP))
    said = check(Story(4, 6, size, strikes, joins=2, deadline_s=0.6), tmp_path)
    (warning,) = [line for line in said if "has not done its part at the border at which a worker joins" in line]
    assert warning.startswith("worker 0 (cpu:0/v0) has not ") and "is stopped (SIGSTOP)" in warning
    (loss,) = [line for line in said if "worker 0 (cpu:0/v0) was stopped (SIGSTOP) for " in line]
    assert loss.endswith("2 workers go on (generation 2).")


@pytest.mark.parametrize("moment", ["taking", "arriving"])
def test_a_newcomer_killed_while_it_joins_or_right_after_is_started_again(moment, tmp_path):
    story = Story(3, 4, "large", (Strike(1, "step 3"), Strike(1, moment, life=2)), joins=1 + (moment == "arriving"))
    said = check(story, tmp_path)
    assert any("before it had joined" in line for line in said) == (moment == "taking"), said


def test_a_member_and_the_newcomer_killed_at_the_same_border_change_no_bit(tmp_path):
    strikes = (Strike(2, "step 3"), Strike(0, "at the border"), Strike(2, "taking", life=2))
    check(Story(4, 6, "large", strikes, joins=2), tmp_path)


def test_a_worker_that_dies_again_and_again_is_started_three_times(tmp_path):
    strikes = (Strike(1, "step 3"), *(Strike(1, "taking", life=life) for life in (2, 3, 4)))
    said = check(Story(2, 2, "small", strikes, joins=3), tmp_path, left=1, joined=0)
    assert sum("is started again" in line for line in said) == 3
    assert said[-1] == "worker 1 (cpu:0/v1) has been started again 3 times; the run goes on without it."


def test_a_newcomer_whose_script_does_not_fit_fails_alone_with_one_line(tmp_path):
    story = Story(2, 2, "small", (Strike(1, "step 3"),), mistake="another call")
    said = check(story, tmp_path, left=1, joined=0)
    assert len(said) == 3 and said[-1] == (
        "worker 1 (cpu:0/v1) could not join: The script does not do the same a second time: it calls 'broadcast from"
        " replica 0', where the others called 'all_reduce sum of float64[]'; the run goes on without it."
    )


def test_an_error_in_a_newcomers_script_is_a_line_and_never_the_end_of_the_run(tmp_path):
    said = check(Story(2, 2, "small", (Strike(1, "step 3"),), joins=3, mistake="an error"), tmp_path, left=1, joined=0)
    failed = "worker 1 (cpu:0/v1) failed with ValueError before it had joined; its log has the rest."
    assert said.count(failed) == 3
    assert said[-1] == "worker 1 (cpu:0/v1) has been started again 3 times; the run goes on without it."


@pytest.mark.slow
def test_a_worker_that_is_stopped_past_its_deadlines_is_killed_and_replaced(tmp_path):
    strike = Strike(1, "step 3", number=signal.SIGSTOP)
    said = check(Story(3, 4, "large", (strike,), deadline_s=1.5), tmp_path)
    assert any("worker 1 (cpu:0/v1) was stopped (SIGSTOP)" in line for line in said), said


def test_one_that_has_come_back_and_goes_on_when_the_others_are_done_does_not_spoil_their_end(tmp_path):
    said = check(Story(3, 3, "small", (Strike(1, "step 3"),), overrun=5), tmp_path, left=2)
    assert "worker 1 (cpu:0/v1) had rejoined, and was not done when the others were" in said[-1]


NOT_AGAIN = (
    "worker 1 (cpu:0/v1) was removed 2 times for the same reason, and is not started again. Register what its script"
    " keeps from step to step: state = strategy.register(name=value)."
)


def check_removals(said: list[str], what: str, num_left: int) -> None:
    """A replacement was removed twice, each time with one line that says why, and was not started again."""
    removed = [line for line in said if " was removed: " in line]
    assert len(removed) == 2 and said[-1] == NOT_AGAIN, said
    for line in removed:
        assert line.startswith(f"worker 1 (cpu:0/v1) was removed: it {what}"), line
        assert "(it had rejoined; strategy.register hands over what a script keeps); " in line, line
    verb = "goes" if num_left == 1 else "go"
    assert removed[-1].endswith(f"; {num_left} worker{'s' * (num_left > 1)} {verb} on (generation 5)."), removed


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("has_probation", [True, False], ids=["on probation", "with replicas"])
def test_a_replacement_that_computes_other_bits_in_its_first_step_is_removed_and_they_do_not_count(
    size, num_workers, has_probation, tmp_path
):
    story = Story(num_workers, 5, size, (Strike(1, "step 3"),), mistake="other numbers", joins=2)
    said = check(replace(story, has_probation=has_probation), tmp_path, left=num_workers - 1)
    check_removals(said, "computed other gradients than worker 0 from the same samples and weights", num_workers - 1)


def test_nobody_would_see_that_without_the_comparison(tmp_path):
    story = Story(3, 5, "large", (Strike(1, "step 3"),), mistake="other numbers", is_compared=False)
    with pytest.raises(AssertionError, match="has rejoined at step"):
        check(replace(story, has_probation=False), tmp_path)


def read_step(said: list[str]) -> int:
    (joined,) = [line for line in said if "has rejoined at step" in line]
    return int(joined.partition(" at step ")[2].partition(";")[0])


def test_a_replacement_has_no_replica_in_its_first_step_and_computes_one_for_comparison(tmp_path):
    launched, said = tell(Story(3, 5, "large", (Strike(1, "step 3"),)), tmp_path)
    step = read_step(said)
    assert [launched.results[worker]["shadowed"] for worker in range(3)] == [[], [[step, 0]], []], said
    assert launched.results[1]["num_own"] == [0, 1, 1], "the least senior has the fewest of five"


def test_a_junior_is_an_original_after_one_comparison_in_which_it_agrees(tmp_path):
    story = Story(3, 5, "small", (Strike(0, "step 3"),))
    check(story, tmp_path / "junior")
    (tmp_path / "kept").mkdir()
    launched, said = tell(replace(story, agrees_at=40), tmp_path / "kept")
    assert [launched.results[worker]["juniors"] for worker in range(3)] == [[], [], []], said
    assert launched.results[0]["shadowed"] == [[read_step(said), 0], [40, 0]]
    assert [launched.results[worker]["was_main"] for worker in range(3)] == [False, True, False]


def test_a_replacement_stays_a_junior_until_workers_are_compared(tmp_path):
    launched, said = tell(Story(3, 5, "small", (Strike(0, "step 3"),)), tmp_path)
    assert [launched.results[worker]["juniors"] for worker in range(3)] == [[0]] * 3, said


@pytest.mark.parametrize("agrees_at", [0, 20], ids=["juniors", "promoted"])
def test_only_replacements_that_were_promoted_go_on_without_the_last_original(agrees_at, tmp_path):
    """Worker 0 dies and is replaced; later worker 1, which was there from the start, dies, too."""
    story = Story(2, 4, "small", (Strike(0, "step 3"), Strike(1, "step 30")), joins=1, agrees_at=agrees_at)
    launched, said = tell(story, tmp_path)
    if agrees_at:
        assert launched.outcome.exit_code == 0 and 0 in launched.results, said
        assert "worker 1 (cpu:0/v1) was ended by SIGKILL; 1 worker goes on (generation 3)." in said
        (tmp_path / "calm").mkdir()
        assert launched.results[0]["sha256"] == calm(4, "small", tmp_path / "calm")["sha256"]
        assert launched.results[0]["was_main"]
    else:
        assert launched.outcome.exit_code == 128 + signal.SIGKILL and not launched.results, said
        assert launched.outcome.last_line.startswith(
            "worker 1 (cpu:0/v1) was ended by SIGKILL; no worker is left that others could join."
        )


@pytest.mark.parametrize("strike_at", [3, 4])
def test_numbers_of_a_replica_without_samples_say_nothing_and_the_next_ones_are_compared(strike_at, tmp_path):
    strikes = (Strike(1, f"step {strike_at}"),)
    story = Story(3, 5, "large", strikes, lacks_rows=True, mistake="other numbers", joins=2)
    check_removals(check(story, tmp_path, left=2), "computed other gradients than worker 0", 2)


@pytest.mark.slow
@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("has_probation", [True, False], ids=["on probation", "with replicas"])
@pytest.mark.parametrize(
    "strike, mistake",
    [
        (Strike(0, "step 10"), ""),
        (Strike(0, "step 10"), "other numbers"),
        (Strike(1, "computed for comparison", life=2), ""),
        (Strike(1, "computed for comparison", life=2), "other numbers"),
        (Strike(1, "arrived", life=2), ""),
    ],
)
def test_a_death_while_a_junior_is_compared_changes_no_bit(strike, mistake, has_probation, size, tmp_path):
    story = Story(3, 5, size, (Strike(1, "step 3"), strike), joins=2, mistake=mistake, has_probation=has_probation)
    said = check(story, tmp_path, left=-1, joined=-1)
    assert sum("was ended by SIGKILL" in line for line in said) == 2, said
    assert any("computed other gradients" in line for line in said) == bool(mistake), said


DEEDS = {
    "raises between steps": "failed with ValueError (invalid literal for int() with base 10: 'no number')",
    "raises in a step": "failed with KeyError ('nothing on worker 1')",
    "exits": "exited with code 3",
    "leaves": "has finished its script at step ",
    "calls something else": "called 'barrier', where the others called 'exchange of step ",
    "says something else": "did something else in its step than the others: '",
}


@pytest.mark.parametrize("num_workers", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("deed", list(DEEDS))
def test_whatever_a_junior_does_otherwise_removes_it_alone(deed, num_workers, tmp_path):
    """Its script keeps something that it has not registered."""
    size = "large" if deed.startswith("says") else "small"
    story = Story(num_workers, 4, size, (Strike(1, "step 5"),), deed=deed, joins=2)
    check_removals(check(story, tmp_path, left=num_workers - 1), DEEDS[deed], num_workers - 1)


def test_others_that_are_lost_after_a_junior_has_left_early_are_started_again(tmp_path):
    strikes = (Strike(1, "step 5"), Strike(2, "step 40"))
    said = check(Story(3, 4, "small", strikes, deed="leaves"), tmp_path, left=-1, joined=-1)
    assert any("worker 1 (cpu:0/v1) was removed: it has finished its script" in line for line in said), said
    assert "worker 2 (cpu:0/v2) is started again, and joins when it is ready." in said


@pytest.mark.parametrize("leaves_in_s", [0.0, 0.6], ids=["that has left", "that is leaving"])
def test_a_loss_beside_a_junior_that_leaves_early_hides_neither(leaves_in_s, tmp_path):
    story = Story(3, 4, "small", (Strike(1, "step 5"),), deed="leaves", leaves_in_s=leaves_in_s, is_struck_then=True)
    said = check(story, tmp_path, left=-1, joined=-1)
    assert any("worker 1 (cpu:0/v1) was removed: it has finished its script" in line for line in said), said
    assert sum("worker 2 (cpu:0/v2) was ended by SIGKILL" in line for line in said) == 1, said
    assert "worker 2 (cpu:0/v2) is started again, and joins when it is ready." in said


def test_what_original_workers_raise_too_is_the_users_error_and_ends_the_run(tmp_path):
    story = Story(3, 4, "small", (Strike(1, "step 5"),), deed="comes to a row that nobody can read")
    launched, said = tell(story, tmp_path)
    assert launched.outcome.exit_code == 1 and launched.outcome.failed_worker in (0, 2), said
    assert sum("was removed: it failed with KeyError" in line for line in said) == 1
    assert "nothing on worker " in launched.outcome.failure["traceback"]
    assert launched.outcome.failure["where"].startswith("in replica ")


MOMENTS = (
    "depositing",
    "staging",
    "arriving",
    "arrived",
    "reducing",
    "reduced",
    "completed",
    "at the border",
    "giving",
)


def write_story(seed: int, *, stops: bool = False) -> Story:
    """Worker 0 or the last one lives; the others die at some moment of their first lives, and of their second.

    With `stops` some of them are stopped there, and are killed when nothing of them has moved for two deadlines.
    """
    chance = random.Random(seed)
    num_workers = chance.randint(2, 4)
    immortal = chance.choice([0, num_workers - 1])
    mortals = [worker for worker in range(num_workers) if worker != immortal]
    strikes = [Strike(worker, f"step {chance.randrange(1, 9)}") for worker in mortals[:1]]
    for worker in mortals[1:]:
        moment, count = chance.choice(MOMENTS), chance.randrange(1, 60)
        # The second arrival of all is at a plain sum before the loop, which cannot go on without a worker's value.
        strikes.append(Strike(worker, moment, max(count, 3) if moment == "arriving" else count))
    for worker in mortals:
        strikes.append(Strike(worker, chance.choice((*MOMENTS, "taking")), chance.randrange(1, 30), life=2))
    size = chance.choice(list(SIZES))
    story = Story(num_workers, chance.randint(num_workers, 6), size, tuple(strikes))
    if not stops:
        return story
    numbers = [signal.SIGSTOP if chance.random() < 0.25 else signal.SIGKILL for _ in strikes]
    struck = tuple(replace(strike, number=number) for strike, number in zip(strikes, numbers, strict=True))
    return replace(story, strikes=struck, deadline_s=0.8)


@pytest.mark.slow
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 20))])
def test_workers_that_come_back_and_die_again_at_random_moments_change_no_bit(block, tmp_path):
    for seed in range(10 * block, 10 * block + 10):
        check(write_story(seed), tmp_path / str(seed), left=-1, joined=-1)
