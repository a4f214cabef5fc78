"""What members of a run write into their marks, for a worker that comes back."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from duoka.data.trail import Place
from duoka.frameworks.marks import choose_handed, describe_also, pack, take_also, unpack
from duoka.strategies.also import Also


class Thing:
    def load_state_dict(self, state) -> None:
        self.state = state


def test_a_record_of_a_fit_comes_back_as_it_was_through_strict_json():
    record = {
        "calls": 14,
        "callbacks": [{"kind": "Mine", "attributes": {"best": math.inf, "pairs": [(1, "a")], "rate": np.float32(0.1)}}],
        "generators": {"numpy": np.arange(5, dtype=np.uint8)},
    }
    again = unpack(json.loads(json.dumps(pack(record), allow_nan=False)))
    attributes = again["callbacks"][0]["attributes"]
    assert attributes["best"] == math.inf and attributes["pairs"] == [(1, "a")]
    assert type(attributes["rate"]) is np.float32 and attributes["rate"] == np.float32(0.1)
    assert again["generators"]["numpy"].dtype == np.uint8 and again["generators"]["numpy"].tolist() == [0, 1, 2, 3, 4]
    assert again["calls"] == 14


def test_of_objects_of_the_user_s_small_ones_are_handed_over_that_can_be_saved():
    states = {"counter": {"bad": 3}, "large": {"losses": [0.5] * 600}, "set": {"seen": {1, 2}}, "unknown": None}
    assert choose_handed(states) == {"counter": {"bad": 3}}
    assert describe_also(None) == {} == describe_also(Place([], {"large": states["large"]}, None))
    thing, also = Thing(), Also()
    also.objects["counter"] = thing
    take_also(also, json.loads(json.dumps(describe_also(Place([], states, None)))))
    assert thing.state == {"bad": 3}
    take_also(also, {"step": 1})
    assert thing.state == {"bad": 3}


@pytest.mark.torch
def test_tensors_of_the_user_s_objects_come_back_as_they_were():
    torch = pytest.importorskip("torch")
    state = {"best": torch.tensor(0.1), "counts": torch.arange(3, dtype=torch.bfloat16)}
    again = unpack(json.loads(json.dumps(pack(state), allow_nan=False)))
    assert again["best"].shape == () and torch.equal(again["best"], state["best"])
    assert again["counts"].dtype == torch.bfloat16 and torch.equal(again["counts"], state["counts"])
    assert choose_handed({"empty": {"x": torch.zeros(3, device="meta")}}) == {}
