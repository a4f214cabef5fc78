"""Objects of the user's own on the way of a script that is resumed."""

from __future__ import annotations

import numpy as np
import pytest

from duoka.data.sizes import count_bytes
from duoka.strategies.also import Also

torch = pytest.importorskip("torch")


class Thing:
    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state) -> None:
        self.value = state["value"]


def test_the_states_of_objects_are_asked_for_once_at_a_place():
    also, thing, asked = Also(), Thing(1), []
    also.objects["thing"] = thing
    thing.state_dict = lambda: asked.append(1) or {"value": 1}
    assert also.look(100) == ({"thing": {"value": 1}}, True) and len(asked) == 1


def test_what_a_script_does_again_begins_with_what_it_has_made_and_ends_with_what_was_saved():
    also, counter, large = Also(), Thing(1), Thing(np.zeros(200_000))
    also.objects |= {"counter": counter, "large": large}
    assert list(also.capture_small()) == ["counter"]
    assert also.look(4) == ({}, False)
    assert also.look(8) == ({"counter": {"value": 1}}, True), "what is never kept twice is not missed"
    saved = {"counter": {"value": 7}, "large": {"value": np.ones(200_000)}}
    also.restore(saved)
    assert counter.value == 7, "to be seen at once"
    also.begin_at_top()
    assert counter.value == 1 and large.value[0] == 1, "what is large is not kept twice"
    counter.value = 2
    also.begin_at_top()
    assert counter.value == 2, "once"
    also.take({"counter": {"value": 5}})
    assert counter.value == 5
    also.arrive()
    assert counter.value == 7


def test_a_sparse_tensor_counts_as_if_it_were_dense():
    assert count_bytes([torch.eye(4).to_sparse(), torch.zeros(3)]) == 76
