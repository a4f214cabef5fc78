"""Who is warned about, waited for and lost: the supervisor's decisions, with clock and readings held in hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from duoka.collectives.patience import Patience
from duoka.runtime.watching import SUPERVISOR, Expired, Lost, Reading, Verdict, Wait, Warned, Watching

DEADLINE_S = 10.0


@dataclass
class Scene:
    """Workers of whom everything is known, looked at as the supervisor does."""

    running: set[int] = field(default_factory=lambda: {0, 1, 2})
    readings: dict[int, Reading] = field(default_factory=dict)
    undecided: tuple[int, ...] = ()
    now: float = 100.0
    watching: Watching = field(default_factory=Watching)

    def wait(self, waiter: int, *missing: int, is_late: bool = True, deadline_s: float = DEADLINE_S) -> None:
        wait = Wait(missing, is_late, self.now - deadline_s, deadline_s, step=7, phase="arrived", number=3)
        self.watching.hear(waiter, wait, self.now)

    def look_for(self, seconds: float, change=lambda scene: None) -> list[tuple[float, Verdict]]:
        """Look whenever it is due; verdicts with the time since the beginning."""
        begin, found = self.now, []
        while (due := self.watching.next_look()) is not None and due <= begin + seconds:
            self.now = max(due, self.now)
            change(self)
            verdicts = self.watching.look(
                self.now, lambda w: self.readings.get(w, Reading("S", 5.0, "a")), self.undecided, self.running
            )
            found += [(self.now - begin, verdict) for verdict in verdicts]
            if lost := {verdict.worker for verdict in verdicts if isinstance(verdict, Lost)}:
                self.running -= lost
                self.watching.start_over()
        self.now = begin + seconds
        return found


def kinds(found: list[tuple[float, Verdict]]) -> list[tuple[str, int]]:
    return [(type(verdict).__name__, getattr(verdict, "worker", -1)) for _, verdict in found]


def test_one_that_neither_computes_nor_moves_is_warned_about_and_lost_after_another_deadline():
    scene = Scene()
    scene.wait(0, 1)
    found = scene.look_for(4 * DEADLINE_S)
    assert kinds(found) == [("Warned", 1), ("Lost", 1)]
    (warned_at, warned), (lost_at, lost) = found
    assert warned_at < 1 and isinstance(warned, Warned) and not warned.is_moving and warned.late_s >= DEADLINE_S
    assert DEADLINE_S <= lost_at < 1.3 * DEADLINE_S and isinstance(lost, Lost)


def test_one_that_is_stopped_is_lost_although_nothing_is_known_of_its_stack():
    scene = Scene(readings={1: Reading("T", 5.0)})
    scene.wait(0, 1)
    scene.wait(2, 1)
    found = scene.look_for(4 * DEADLINE_S)
    assert kinds(found) == [("Warned", 1), ("Lost", 1)]
    assert found[0][1].num_waiting == 2


def test_one_that_was_stopped_and_goes_on_is_not_lost():
    def go_on(scene: Scene) -> None:
        is_stopped = scene.now < 100 + 0.8 * DEADLINE_S
        scene.readings[1] = Reading("T" if is_stopped else "R", 5.0 if is_stopped else 5.0 + scene.now, "a")

    scene = Scene()
    scene.wait(0, 1)
    assert kinds(scene.look_for(3 * DEADLINE_S, go_on)) == [("Warned", 1)]


def compute(share: float, state: str = "S"):
    def change(scene: Scene) -> None:
        scene.readings[1] = Reading(state, share * scene.now, "a")

    return change


def test_one_that_computes_is_waited_for_and_lines_about_it_become_rare():
    scene = Scene()
    scene.wait(0, 1)
    found = scene.look_for(100 * DEADLINE_S, compute(share=0.9))
    assert kinds(found) == [("Warned", 1)] * 4
    assert [round(verdict.late_s / DEADLINE_S) for _, verdict in found] == [1, 4, 17, 67]
    assert all(verdict.is_moving for _, verdict in found)


def test_one_that_would_run_if_a_core_were_free_is_waited_for():
    scene = Scene()
    scene.wait(0, 1)
    assert ("Lost", 1) not in kinds(scene.look_for(20 * DEADLINE_S, compute(share=0.0, state="R")))


def test_one_that_gets_little_of_a_busy_machine_computes_all_the_same():
    scene = Scene()
    scene.wait(0, 1)
    assert ("Lost", 1) not in kinds(scene.look_for(20 * DEADLINE_S, compute(share=0.03)))


def test_what_timers_and_idle_threads_use_is_no_computing():
    scene = Scene()
    scene.wait(0, 1)
    assert kinds(scene.look_for(4 * DEADLINE_S, compute(share=0.002))) == [("Warned", 1), ("Lost", 1)]


def test_a_stack_that_moves_is_a_sign_of_life_without_cpu_time():
    def walk(scene: Scene) -> None:
        scene.readings[1] = Reading("S", 5.0, f"line {int(scene.now / (0.7 * DEADLINE_S))}")

    scene = Scene()
    scene.wait(0, 1)
    assert kinds(scene.look_for(3 * DEADLINE_S, walk)) == [("Warned", 1)]


def test_a_stack_that_becomes_known_has_not_moved():
    def become_known(scene: Scene) -> None:
        scene.readings[1] = Reading("S", 5.0, "a" if scene.now > 100 + DEADLINE_S / 2 else "")

    scene = Scene()
    scene.wait(0, 1)
    found = scene.look_for(4 * DEADLINE_S, become_known)
    assert kinds(found) == [("Warned", 1), ("Lost", 1)] and found[1][0] < 1.3 * DEADLINE_S


def test_one_that_is_held_by_a_debugger_is_not_lost():
    scene = Scene(readings={1: Reading("t", 5.0, "a")})
    scene.wait(0, 1)
    assert ("Lost", 1) not in kinds(scene.look_for(10 * DEADLINE_S))


def test_one_that_comes_in_time_for_the_second_look_is_not_even_mentioned():
    scene = Scene()
    scene.wait(0, 1)
    assert scene.look_for(0) == []
    scene.watching.hear_end(0)
    assert scene.look_for(5 * DEADLINE_S) == []


def test_a_second_one_that_waits_does_not_hasten_the_look_that_needs_a_stack():
    scene = Scene()
    scene.wait(0, 1)
    scene.look_for(0)
    scene.now += 0.01
    scene.wait(2, 1)
    assert scene.look_for(0.1) == []
    assert kinds(scene.look_for(0.3)) == [("Warned", 1)]


def test_one_that_waits_itself_is_not_to_blame():
    scene = Scene()
    scene.wait(0, 1, 2)
    scene.look_for(0)
    scene.wait(1, 2, is_late=False)
    assert kinds(scene.look_for(4 * DEADLINE_S)) == [("Warned", 2), ("Lost", 2)]


def test_workers_that_wait_for_one_another_are_told_that_it_will_not_end():
    scene = Scene(running={0, 1})
    scene.wait(0, 1)
    scene.wait(1, 0)
    ((moment, verdict),) = scene.look_for(1.2 * DEADLINE_S)
    assert isinstance(verdict, Expired) and set(verdict.waits) == {0, 1} and moment >= DEADLINE_S


def test_nobody_is_lost_when_nobody_would_be_left():
    scene = Scene(running={1, 2})  # worker 0, who waits, has just ended
    scene.wait(0, 1, 2)
    assert "Lost" not in [kind for kind, _ in kinds(scene.look_for(1.3 * DEADLINE_S))]


def test_after_a_loss_those_are_watched_whose_report_is_awaited():
    scene = Scene(undecided=(2,))
    scene.wait(0)
    scene.wait(1)
    assert kinds(scene.look_for(4 * DEADLINE_S)) == [("Warned", 2), ("Lost", 2)]


def test_time_in_which_nobody_looked_does_not_count():
    scene = Scene()
    scene.wait(0, 1)
    scene.look_for(DEADLINE_S / 4)
    scene.now += 50 * DEADLINE_S  # all of them were frozen, the supervisor, too
    assert ("Lost", 1) not in kinds(scene.look_for(DEADLINE_S / 4))


def test_two_that_are_stuck_are_both_lost():
    scene = Scene()
    scene.wait(0, 1, 2)
    assert kinds(scene.look_for(4 * DEADLINE_S))[-2:] == [("Lost", 1), ("Lost", 2)]


# The worker's side.


class Line:
    def __init__(self) -> None:
        self.sent: list[dict] = []

    def send(self, message: dict) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float) -> None:
        return None


def test_a_wait_is_told_past_its_deadline_once_and_again_when_somebody_else_is_missing():
    now, line = [0.0], Line()
    patience = Patience(line, lambda: now[0], 10.0, lambda deadline_s: deadline_s, {"step": 3})
    for now[0], missing in ((0.0, [1, 2]), (9.9, [1, 2]), (10.0, [1, 2]), (11.0, [1, 2]), (12.0, [2])):
        patience.tell(missing)
    patience.end()
    assert [message.get("missing") for message in line.sent] == [[1, 2], [2], None]
    assert line.sent[0] == {"kind": "waiting", "missing": [1, 2], "is_late": True} | {
        "waited_s": 10.0,
        "deadline_s": 10.0,
        "step": 3,
    }


def test_steps_that_take_long_lengthen_the_deadline():
    now, line = [10.0], Line()
    patience = Patience(line, lambda: now[0], 10.0, lambda deadline_s: 90.0, {})
    now[0] = 99.0
    patience.tell([1])
    assert line.sent == [] and patience.left() == 1.0
    now[0] = 101.0
    patience.tell([1])
    assert line.sent[0]["deadline_s"] == 90.0


def test_a_wait_that_ends_in_time_is_not_mentioned():
    line = Line()
    patience = Patience(line, lambda: 0.0, 10.0, lambda deadline_s: deadline_s, {})
    patience.tell([1])
    patience.end()
    assert line.sent == []


def test_the_last_one_is_lost_where_somebody_else_than_a_member_waits_for_it():
    scene = Scene(running={1})
    scene.wait(SUPERVISOR, 1)
    assert kinds(scene.look_for(3 * DEADLINE_S)) == [("Warned", 1), ("Lost", 1)]


def test_the_last_one_that_computes_is_not_lost_whoever_waits_for_it():
    scene = Scene(running={1})
    scene.wait(SUPERVISOR, 1)
    assert kinds(scene.look_for(3 * DEADLINE_S, compute(0.5))) == [("Warned", 1)]
