"""What a script finds between its loops when it is run again: the run as it was there."""

from __future__ import annotations

from duoka.data.trail import Place, Trail


class Script:
    """Counts, and draws one number for each place. Ends where it is told to, and gives what it saw until there."""

    def __init__(self, saved: dict | None = None) -> None:
        self.step, self.drawn, self.is_led = 0, 0, saved is not None
        self.also: dict[str, list[int]] = {}
        self.is_whole = True
        self.told: list[str] = []
        self.trail = Trail(self._describe, self._take, lambda: self.drawn, lambda: self.is_led, self.told.append)
        self.seen: list[tuple[str, int, int]] = []
        if saved is not None:
            self.trail.restore(saved)

    def _describe(self, largest_bytes: int) -> Place:
        return Place([self.step], dict(self.also), self.drawn, self.is_whole or largest_bytes > 4096)

    def _take(self, place: Place) -> None:
        (self.step,) = place.counts
        self.also |= place.also
        if place.generators is not None:
            self.drawn = place.generators

    def train(self, num_steps: int) -> None:
        self.trail.begin_pass()
        if not self.is_led:
            self.step += num_steps
            self.drawn += 100 * num_steps  # as bodies of one replica do
        self.trail.end_pass()

    def look(self) -> None:
        self.drawn += 1
        self.seen.append((self.trail.place, self.step, self.drawn))


def walk_range(script: Script, num_passes: int) -> Script:
    for _ in range(num_passes):
        script.train(4)
        script.look()
    return script


def test_a_plain_range_counts_and_draws_after_each_pass_as_it_did():
    first = walk_range(Script(), 3)
    again = walk_range(Script(first.trail.capture()), 3)
    assert [(place, step) for place, step, _ in again.seen] == [("0 1", 4), ("0 2", 8), ("0 3", 12)]
    assert again.seen == first.seen and not again.told


def test_after_very_many_passes_the_last_ones_are_as_they_were_and_others_are_told_of():
    first = walk_range(Script(), 1000)
    again = walk_range(Script(first.trail.capture()), 1000)
    assert [seen[:2] for seen in again.seen] == [seen[:2] for seen in first.seen]
    assert again.seen[-64:] == first.seen[-64:] and again.seen[10] != first.seen[10]
    assert "more than 64 before the save" in again.told[0]


def test_what_is_kept_of_objects_at_the_ends_of_passes_does_not_grow_without_end():
    script = Script()
    script.also = {"losses": [0] * 500}
    walk_range(script, 1000)
    ends = script.trail.capture()["ends"]["0"]
    assert ends["counts"].shape == (1000, 3)
    assert list(ends["also"]) == [str(number) for number in range(1000 - (1 << 17) // 4000, 1000)]
    again = walk_range(Script(script.trail.capture()), 1000)
    assert sum("registered objects of more than 4 KB, or 128 KB of them" in line for line in again.told) == 1000 - 32


def test_an_object_that_was_too_large_for_a_place_is_told_of_there():
    script = Script()
    script.is_whole = False
    again = walk_range(Script(walk_range(script, 2).trail.capture()), 2)
    assert len(again.told) == 2 and all("may be different; loop over strategy.epochs" in line for line in again.told)


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
    assert set(saved["ends"]) == {"1"}
    again = Script(saved)
    walk(again)
    assert again.seen == first.seen[-3:]
    again.is_led = False
    again.trail.arrive(saved)
    again.train(2)
    assert again.trail.place == "epoch 1" and len(again.trail.capture()["ends"]["epoch"]["counts"]) == 1


def test_generators_of_a_few_loops_are_kept():
    script = Script()
    for call in range(100):
        script.trail.begin_epoch(is_resumed=False)
        script.trail.end_epochs(call)
    starts = script.trail.capture()["starts"]
    assert sum(place["generators"] is not None for place in starts.values()) == 64
    assert starts["99"]["generators"] is not None


def test_a_generator_that_is_there_only_at_the_end_of_a_pass_was_drawn_from():
    script = Script()
    script.drawn = [1]  # as states of cards are: none until the first use
    script.trail.begin_pass()
    script.drawn = [1, 2]
    script.trail.end_pass()
    assert script.trail.capture()["ends"]["0"]["generators"] == {"0": [1, 2]}


def test_the_last_place_is_known_with_what_objects_were_like_there_and_so_it_is_when_it_is_taken_again():
    def walk(script: Script) -> list:
        seen = []
        for number in range(3):
            script.also = {"count": [number]} if not script.is_led else script.also
            script.train(1)
            seen.append(script.trail.last and (script.trail.last.counts, script.trail.last.also))
        return seen

    first = Script()
    expected = walk(first)
    assert expected == [([number + 1], {"count": [number]}) for number in range(3)]
    again = Script(first.trail.capture())
    assert walk(again) == expected
    again.train(1)
    assert again.trail.last is None, "nothing is known of it"
