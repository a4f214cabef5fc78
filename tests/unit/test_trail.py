"""What a script finds between its loops when it is run again: the run as it was there."""

from __future__ import annotations

from duoka.data.trail import Trail


class Script:
    """Counts, and draws one number for each place. Ends where it is told to, and gives what it saw until there."""

    def __init__(self, saved: dict | None = None) -> None:
        self.step, self.drawn, self.is_led = 0, 0, saved is not None
        self.trail = Trail(self._describe, self._take, lambda: self.is_led)
        self.seen: list[tuple[str, int, int]] = []
        if saved is not None:
            self.trail.restore(saved)

    def _describe(self, largest_bytes: int) -> dict:
        return {"step": self.step, "generators": self.drawn}

    def _take(self, facts: dict) -> None:
        self.step = facts["step"]
        if facts["generators"] is not None:
            self.drawn = facts["generators"]

    def train(self, num_steps: int) -> None:
        self.trail.begin_pass()
        if not self.is_led:
            self.step += num_steps
            self.drawn += 100 * num_steps  # as bodies of one replica do
        self.trail.end_pass()

    def look(self) -> None:
        self.drawn += 1
        self.seen.append((self.trail.place, self.step, self.drawn))


def test_a_plain_range_counts_at_each_pass_and_draws_after_the_last_one_as_it_did():
    first = Script()
    for _ in range(3):
        first.train(4)
        first.look()
    again = Script(first.trail.capture())
    for _ in range(3):
        again.train(4)
        again.look()
    assert [(place, step) for place, step, _ in again.seen] == [("0 1", 4), ("0 2", 8), ("0 3", 12)]
    assert again.seen[-1] == first.seen[-1], "and the last draw"


def walk(script: Script) -> None:
    script.trail.begin_pass()
    if not script.is_led:
        for _ in range(2):
            script.trail.begin_epoch(is_resumed=False)
            script.train(3)
            script.look()
    script.trail.end_epochs(1)
    script.look()
    script.train(1)
    script.look()
    script.trail.begin_epoch(is_resumed=script.is_led)
    script.look()


def test_a_finished_loop_is_left_as_it_was_and_an_epoch_begins_as_it_did():
    first = Script()
    walk(first)
    saved = first.trail.capture()
    assert set(saved["ends"]) == {"0", "1", "epoch"} and saved["ends"]["epoch"] == []
    again = Script(saved)
    walk(again)
    assert again.seen == first.seen[-3:]
    again.is_led = False
    again.trail.arrive(saved)
    again.train(2)
    assert again.trail.place == "epoch 1" and len(again.trail.capture()["ends"]["epoch"]) == 1


def test_generators_of_a_few_loops_are_kept():
    script = Script()
    for call in range(100):
        script.trail.begin_epoch(is_resumed=False)
        script.trail.end_epochs(call)
    starts = script.trail.capture()["starts"]
    assert sum(facts["generators"] is not None for facts in starts.values()) == 64
    assert starts["99"]["generators"] is not None
