"""Objects of the user's own on the way of a script that is resumed."""

from __future__ import annotations

import numpy as np

from duoka.strategies.also import Also


class Thing:
    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state) -> None:
        self.value = state["value"]


def make(value=0, average=0.0) -> tuple[Also, Thing, Thing]:
    also, counter, large = Also(), Thing(value), Thing(np.full(200_000, average))
    also.objects |= {"counter": counter, "large": large}
    return also, counter, large


def save() -> dict:
    also, counter, large = make()
    counter.value = 5
    also.begin_epoch(is_resumed=False)
    counter.value, large.value = 7, np.full(200_000, 7.0)
    return also.capture()


def test_a_resumed_epoch_begins_with_what_they_were_then_and_goes_on_with_what_was_saved():
    also, counter, large = make()
    also.restore(save())
    assert counter.value == 7, "to be seen at once"
    also.begin_epoch(is_resumed=True)
    assert counter.value == 5 and large.value[0] == 7.0, "what is large is kept once"
    counter.value = 6
    assert also.capture()["also_at_epoch"] == {"counter": {"value": 5}}
    also.arrive()
    assert counter.value == 7 and large.value[0] == 7.0


def test_finished_passes_are_gone_through_with_what_the_script_has_made():
    also, counter, _ = make(value=1)
    also.restore(save())
    also.begin_at_top()
    assert counter.value == 1
    counter.value = 2
    also.begin_at_top()
    assert counter.value == 2, "once"
    also.arrive()
    assert counter.value == 7
