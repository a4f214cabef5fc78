"""What members of a run write down at the end of a `fit`, for a worker that comes back."""

from __future__ import annotations

import json
import math

import numpy as np

from duoka.frameworks.keras.newcomers import _pack, _unpack


def test_a_record_of_a_fit_comes_back_as_it_was_through_strict_json():
    record = {
        "calls": 14,
        "callbacks": [{"kind": "Mine", "attributes": {"best": math.inf, "pairs": [(1, "a")], "rate": np.float32(0.1)}}],
        "generators": {"numpy": np.arange(5, dtype=np.uint8)},
    }
    again = _unpack(json.loads(json.dumps(_pack(record), allow_nan=False)))
    attributes = again["callbacks"][0]["attributes"]
    assert attributes["best"] == math.inf and attributes["pairs"] == [(1, "a")]
    assert type(attributes["rate"]) is np.float32 and attributes["rate"] == np.float32(0.1)
    assert again["generators"]["numpy"].dtype == np.uint8 and again["generators"]["numpy"].tolist() == [0, 1, 2, 3, 4]
    assert again["calls"] == 14
