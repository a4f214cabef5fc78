"""Where a script is in its data, and when something is due again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from duoka.collectives.board import Row, Work
from duoka.data.position import Epochs, Passes, Saves, stretch_after, stretch_in
from duoka.errors import CheckpointError
from duoka.runtime.termination import Activity, Termination
from duoka.strategies.rhythm import Rhythm
from tests.limits import START_S


def walk(passes: Passes, num_batches: int) -> list[int]:
    first = passes.begin()
    given = [] if first is None else list(range(first, num_batches))
    for _ in given:
        passes.give()
    passes.end()
    return given


def test_finished_passes_give_nothing_and_the_one_under_way_goes_on():
    passes = Passes()
    passes.resume({"passes": 2, "batches": 3, "at_epoch": 2, "order": ""})
    assert [walk(passes, 5) for _ in range(4)] == [[], [], [3, 4], [0, 1, 2, 3, 4]]
    assert passes.position == (4, 0)


def test_a_position_that_is_reached_already_is_not_resumed():
    passes = Passes()
    walk(passes, 5)
    passes.begin()
    passes.give()
    passes.resume(passes.capture())
    assert passes.where == (1, 1, True) and not passes.is_resumed


def test_epochs_start_where_the_run_is_and_passes_go_with_them():
    passes = Passes()
    epochs = Epochs(begin=lambda is_resumed: passes.begin_resumed_epoch() if is_resumed else passes.begin_epoch())
    epochs.resume({"call": 2, "epoch": 1})
    passes.resume({"passes": 4, "batches": 2, "at_epoch": 4, "order": ""})
    assert list(epochs.walk(3)) == []
    assert [(epoch, walk(passes, 4)) for epoch in epochs.walk(3)] == [(1, [2, 3]), (2, [0, 1, 2, 3])]
    saved = epochs.capture()
    assert (saved["call"], saved["epoch"], saved["is_over"]) == (2, 3, True) and passes.capture()["at_epoch"] == 5


def walk_epochs(num_epochs: int, saved: dict | None = None, num_passes: int = 0) -> tuple[list, dict]:
    """A script of one loop over epochs, and of passes after it: what it did in which epoch, its state at the end."""
    passes, done = Passes(), []

    def leave_out(goes_on: bool) -> bool:
        is_here = saved["passes"]["is_at_epoch"]
        done.append("arrived" if is_here else "led on")
        passes.begin_resumed_epoch()
        return is_here

    epochs = Epochs(
        begin=lambda is_resumed: passes.begin_resumed_epoch() if is_resumed else passes.begin_epoch(),
        end=passes.begin_epoch,
        leave_out=leave_out,
    )
    if saved is not None:
        epochs.resume(saved["epochs"])
        passes.resume(saved["passes"])
    done += [(epoch, walk(passes, 3)) for epoch in epochs.walk(num_epochs)]
    done += [walk(passes, 3) for _ in range(num_passes)]
    return done, {"epochs": epochs.capture(), "passes": passes.capture()}


def test_passes_after_a_loop_over_epochs_are_led_through_and_not_done_again():
    _, saved = walk_epochs(2, num_passes=2)
    assert walk_epochs(2, saved, num_passes=4)[0] == ["led on", [], [], [0, 1, 2], [0, 1, 2]]
    with pytest.raises(CheckpointError, match=r"Loop 1 .* had 2 epochs .* asked for 3 now"):
        walk_epochs(3, saved)


def test_an_evaluation_after_a_loop_over_epochs_runs_again_where_the_run_goes_on_from_its_end():
    calm = Passes()
    for _ in range(2):
        walk(calm, 3)
    calm.begin_epoch()  # the loop has ended
    walk(calm, 3)
    again, left_out = Passes(), Passes()
    again.resume(calm.capture())
    again.start_at_epoch()
    assert (walk(again, 3), again.number, again.position) == ([0, 1, 2], 2, (3, 0))
    left_out.resume(calm.capture())
    left_out.begin_resumed_epoch()
    assert walk(left_out, 3) == []


def test_passes_that_only_followed_another_loop_are_known_as_such_when_a_script_is_run_again():
    def run(passes: Passes) -> list[bool]:
        led = []
        for leads in (False, False, True, False, True):
            if passes.begin() is not None and leads:
                passes.lead()
            if passes.is_open:
                passes.end()
            led.append(passes.has_led)
        return led

    calm, again = Passes(), Passes()
    expected = run(calm)
    assert expected == [False, False, True, False, True]
    again.resume(calm.capture())
    assert run(again) == expected


class Scripted:
    """A script of loops over epochs and of passes before, in and after them, each of which leads or follows."""

    def __init__(self, saved: dict | None = None) -> None:
        self.passes, self.led = Passes(), []
        self.epochs = Epochs(
            begin=self._begin, leave_out=self._leave_out, end=self._end, leave=self._leave, come_by_finished=self._leave
        )
        if saved is not None:
            self.epochs.resume(saved["epochs"])
            self.passes.resume(saved["passes"])

    def _begin(self, is_resumed: bool) -> None:
        self.passes.begin_stretch(stretch_in(self.epochs.num_calls))
        self.passes.begin_resumed_epoch() if is_resumed else self.passes.begin_epoch()

    def _leave(self) -> None:
        self.passes.begin_stretch(stretch_after(self.epochs.num_calls))

    def _leave_out(self, goes_on: bool) -> bool:
        self._leave()
        self.passes.begin_resumed_epoch()
        return False

    def _end(self) -> None:
        self.passes.begin_epoch()
        self._leave()

    def walk(self, *leads: bool) -> None:
        for each in leads:
            if self.passes.begin() is not None:
                self.passes.give()
                self.passes.lead() if each else None
                self.passes.end()
            self.led.append((self.epochs.num_calls, self.passes.has_led))

    def run(self) -> dict:
        """Between loops it leads once, in the second place."""
        self.walk(False, True)
        for epoch in self.epochs.walk(3):
            self.walk(True, *[False] * epoch)
        self.walk(False, True, False)
        for epoch in self.epochs.walk(5):
            self.walk(True)
            if epoch == 2:
                break
        self.walk(False, True, False)
        for _ in self.epochs.walk(1):
            self.walk(False, True)
        self.walk(True, False)
        return {"epochs": self.epochs.capture(), "passes": self.passes.capture()}


def test_whether_passes_led_is_known_behind_loops_over_epochs_that_are_left_out():
    calm = Scripted()
    saved = calm.run()
    between = [(0, False), (0, True), (1, False), (1, True), (1, False), (2, False), (2, True), (2, False)]
    assert set(between) <= set(calm.led)
    again = Scripted(saved)
    assert again.run() == saved
    assert again.led == [*between, (3, True), (3, False)]


def test_a_pass_that_follows_after_a_save_between_passes_is_not_taken_for_the_one_that_led_before():
    first = Scripted()
    first.walk(True)
    again = Scripted({"epochs": first.epochs.capture(), "passes": first.passes.capture()})
    again.walk(True, False, True)
    assert again.led == [(0, True), (0, False), (0, True)]


def test_whether_passes_led_takes_no_more_room_with_every_epoch():
    script = Scripted()
    for _ in script.epochs.walk(100):
        script.walk(False, True, False)
    assert len(script.passes.capture()["led"]) == 3


def test_whether_passes_led_is_read_as_it_was_saved_by_their_numbers():
    passes = Passes()
    saved = {"passes": 4, "batches": 0, "is_open": False, "at_epoch": 0, "order": "", "leads": [[0, 0], [2, 1], [3, 0]]}
    passes.resume(saved)
    led = []
    for _ in range(4):
        assert passes.begin() is None
        led.append(passes.has_led)
    assert led == [False, False, True, False]


def test_a_loop_that_was_over_goes_on_when_it_is_given_more_epochs():
    _, saved = walk_epochs(2)
    assert walk_epochs(2, saved)[0] == ["arrived"]
    done, later = walk_epochs(4, saved)
    assert done == ["arrived", (2, [0, 1, 2]), (3, [0, 1, 2])]
    assert later == walk_epochs(4)[1]


def test_fewer_epochs_than_were_trained_are_refused():
    _, saved = walk_epochs(4)
    with pytest.raises(CheckpointError, match=r"Epoch 4 is over in the saved run, and strategy\.epochs is asked for 2"):
        walk_epochs(2, saved)
    saved["epochs"] |= {"epoch": 2, "is_over": False}
    with pytest.raises(CheckpointError, match="Epoch 3 is under way"):
        walk_epochs(2, saved)


def test_a_loop_that_was_followed_by_another_one_cannot_have_other_epochs():
    epochs = Epochs()
    list(epochs.walk(2)), list(epochs.walk(3))
    for number in (1, 4):
        again = Epochs()
        again.resume(epochs.capture())
        with pytest.raises(CheckpointError, match=f"Loop 1 .* had 2 epochs .* asked for {number} now"):
            list(again.walk(number))


def test_a_save_that_the_script_does_not_come_by_any_more_is_said_and_not_waited_for():
    told: list[str] = []
    saves = Saves(told.append)
    saves.resume([1, 3, 1, 0])
    assert not saves.come_by(1, 2) and saves.is_awaited
    saves.end_epochs(1, 3)
    assert saves.is_awaited and not told, "it comes after this loop"
    saves.end_epochs(1, 4)
    assert not saves.is_awaited and len(told) == 1
    saves.resume([1, 3, 1, 0])
    saves.begin_step()
    assert not saves.is_awaited and len(told) == 2


def test_a_rhythm_counts_steps_from_the_beginning_and_seconds_from_the_last_time():
    now = [0.0]
    rhythm = Rhythm(every_steps=100, every_s=10, clock=lambda: now[0])
    rhythm.begin(150)
    assert [step for step in range(150, 320) if rhythm.is_due(step)] == [200, 300]
    now[0] = 10.0
    assert not rhythm.is_due(300), "the state has not changed"
    assert rhythm.is_due(320) and not rhythm.is_due(321)
    for wrong in ({"every_steps": 0}, {"every_steps": True}, {"every_s": 0}, {"every_s": "1"}):
        with pytest.raises(CheckpointError, match="cannot be used"):
            Rhythm(**wrong)


def test_the_exit_code_of_a_wish_counts_only_when_it_was_wished():
    termination = Termination(patience_s=60)
    assert not termination.is_granted(143)
    termination.wish(now=5.0, seen={})
    assert termination.due == 65.0 and termination.is_granted(143) and not termination.is_granted(1)


def test_a_run_that_is_to_end_is_waited_for_as_long_as_something_of_it_moves():
    def see(begun: int, cpu_s: float) -> dict[int, Activity]:
        return {0: Activity(Row(1, begun, 0, 0), Work(), cpu_s)}

    termination = Termination(patience_s=60)
    termination.wish(0.0, see(1, 5.0))
    assert termination.wait_on(60.0, see(2, 5.0)) and termination.due == 120.0, "a call has begun"
    assert termination.wait_on(120.0, see(2, 9.0)), "it computes"
    assert termination.wait_on(180.0, see(2, 9.1)), "it sleeps, and is lost only after as long again"
    assert not termination.wait_on(240.0, see(2, 9.2)) and termination.idle_s == 120.0
    termination.is_training = False
    assert not termination.wait_on(300.0, see(3, 9.2)), "nothing is unsaved"


def test_a_second_signal_is_the_second_of_one_process_without_those_that_were_passed_on():
    termination = Termination(patience_s=60)
    termination.savers = {0: True, 1: True, 2: False}
    assert not termination.is_second(0), "a worker has got one from outside"
    assert [termination.pass_to(worker) for worker in (0, 1, 2)] == [False, True, False]
    assert not termination.is_second(1) and not termination.is_second(None) and not termination.is_second(1)
    assert termination.is_second(0) and termination.is_second(1) and termination.is_second(None)


class Follower:
    """A script that makes an iterator once, draws from it in the bodies of another loop, and makes another at its end.

    `num_bodies` have happened before; a script that is run again does not come by them.
    """

    def __init__(self, saved: dict | None = None, in_epochs: bool = False) -> None:
        self.passes, self.drawn = Passes(), []
        if saved is not None:
            self.passes.resume(saved)
        self._batches = self._iterate(is_inner=False)
        if in_epochs and saved is not None:
            self.passes.begin_resumed_epoch()
        elif in_epochs:
            self.passes.begin_epoch()

    def _iterate(self, *, is_inner: bool):
        first = self.passes.begin(is_inner=is_inner)
        return iter(()) if first is None else self._walk(first, self.passes.number)

    def _walk(self, first: int, number: int):
        for position in range(first, 3):
            self.passes.give()
            yield number, position
        self.passes.end()

    def run(self, num_bodies: int) -> dict:
        for _ in range(num_bodies):
            try:
                self.drawn.append(next(self._batches))
            except StopIteration:
                self._batches = self._iterate(is_inner=True)
                self.drawn.append(next(self._batches))
        return self.passes.capture()


@pytest.mark.parametrize("in_epochs", [False, True])
@pytest.mark.parametrize("again", [0, 2, 3])
@pytest.mark.parametrize("stop", range(1, 12))
def test_an_iterator_that_is_made_anew_in_bodies_goes_on_wherever_it_is_stopped(stop, again, in_epochs):
    calm = Follower(in_epochs=in_epochs)
    calm.run(20)
    assert calm.drawn == [(number // 3, number % 3) for number in range(20)]
    first = Follower(in_epochs=in_epochs)
    saved = first.run(stop)
    second = Follower(saved, in_epochs=in_epochs)
    saved = second.run(again)
    third = Follower(saved, in_epochs=in_epochs)
    third.run(20 - stop - again)
    assert first.drawn + second.drawn + third.drawn == calm.drawn


@pytest.mark.parametrize("leads", [True, False])
def test_an_inner_pass_under_way_is_not_forgotten_by_a_run_that_is_saved_again_before_it_comes_to_it(leads):
    """As a mark for workers that come back is: members write it when the epoch begins, before any body."""

    def begin_outer(passes: Passes) -> None:
        passes.begin()
        if passes.is_open:
            passes.give()
            passes.lead()
            passes.end()

    first = Passes()
    if leads:
        begin_outer(first)
    assert first.begin(is_inner=True) == 0
    first.order = "abc"
    for _ in range(2):
        first.give()
    saved = first.capture()
    for _ in range(3):
        again = Passes()
        again.resume(saved)
        if leads:
            begin_outer(again)
        assert again.where == (*first.position, False)
        saved = again.capture()
    assert (again.begin(is_inner=True), again.number, again.expected_order()) == (2, first.number, "abc")


def test_an_iterator_that_is_left_in_a_variable_when_an_epoch_begins_was_over_before():
    passes = Passes()
    saved = {}
    for epoch in range(3):
        passes.begin_epoch()
        passes.end()  # of the last one: its variable is bound anew
        passes.begin()
        for _ in range(2):
            passes.give()
        saved[epoch] = passes.capture()
    again = Passes()
    again.resume(saved[1])
    again.begin_resumed_epoch()
    assert (again.begin(), again.number) == (2, 1)


LEFT_BEHIND = """
import ctypes, os, sys
from duoka.data.position import Epochs
os.kept = Epochs(leave=lambda: print("left")).walk(3)
next(os.kept)
for name in ("os", "duoka.data.position"):  # held to the very end, their names are set to None, the latter's first
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules[name]))
"""


def test_a_loop_over_epochs_that_is_left_when_the_interpreter_ends_is_silent():
    done = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=START_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
