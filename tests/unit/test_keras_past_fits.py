"""What checkpoints know of fits that are over, and of evaluations between them: enough, and not without end."""

from __future__ import annotations

import json

import numpy as np

from duoka.checkpoint.tree import describe
from duoka.frameworks.keras.evaluations import Evaluations
from duoka.frameworks.keras.past_fits import PastFits, describe_unknown

NOTES: list[float] = []  # of a callback that is given to all fits


def record(number: int, also=None) -> dict:
    chance = np.random.default_rng(number)
    history = {"epoch": [0], "history": {"loss": [1 / number]}}
    counts = {"calls": 2 * number, "num_calls": 2, "epochs": 1, "is_stopped": False, "is_cut": False}
    generators = {"torch": chance.integers(0, 255, 5056).astype(np.uint8), "numpy": np.zeros(2524, np.uint8)}
    callbacks = [{"kind": "Mine", "attributes": {"notes": NOTES}}, {"kind": "History", "attributes": history}]
    return counts | {
        "step": 2 * number,
        "bodies": 2 * number,
        "callbacks": callbacks,
        "generators": generators,
        "also": {"seen": {"n": number}} if also is None else also,
        "reading": [],
    }


def fitted(num_fits: int) -> PastFits:
    fits = PastFits()
    NOTES.clear()
    for number in range(1, num_fits + 1):
        fits.begin(number, {"seen": {"n": number - 0.5}})
        NOTES.append(float(number))
        fits.end(number, record(number))
    return fits


def count_bytes_written(state: dict) -> int:
    arrays = []
    text = json.dumps(describe(state, lambda value, place: {"array": arrays.append(value)}))
    return len(text) + sum(array.nbytes for array in arrays)


def test_the_epochs_of_a_fit_are_known_when_it_is_over_until_it_goes_on():
    fits = fitted(2)
    fits.end(3, record(3) | {"epochs": 4})
    assert [fits.num_epochs(number) for number in range(5)] == [0, 1, 1, 4, 0]
    fits.forget(3)
    assert fits.num_epochs(3) == 0


def test_fits_that_are_over_are_as_they_were_with_what_callbacks_and_objects_had_then():
    fits = PastFits()
    fits.restore(fitted(5).capture())
    found = fits.find(3)
    assert found is not None and fits.find(6) is None
    expected = record(3)
    assert all(found[name] == expected[name] for name in ("calls", "num_calls", "epochs", "step", "bodies", "also"))
    mine, history = found["callbacks"]
    assert mine["attributes"]["notes"] == [1.0, 2.0, 3.0], "not those of the list that the callback goes on with"
    assert history["attributes"]["history"] == {"loss": [1 / 3]}
    assert np.array_equal(found["generators"]["torch"], expected["generators"]["torch"])
    assert fits.also_at_begin(3) == {"seen": {"n": 2.5}}
    assert not describe_unknown(found, "also", "generators", "callbacks")
    fits.forget(3)
    assert fits.find(3) is None


def test_a_thousand_fits_take_little_and_what_is_not_known_of_old_ones_is_told():
    few, many = (count_bytes_written(fitted(number).capture()) for number in (100, 200))
    assert many - few < 100 * 2000, "callbacks, whose notes grow, and counts; generators of the last ones only"
    fits = fitted(1000)
    assert count_bytes_written(fits.capture()) < 2_500_000
    newest, oldest = fits.find(940), fits.find(3)
    assert newest is not None and oldest is not None
    assert not describe_unknown(newest, "also", "generators")
    assert oldest["also"] == {"seen": {"n": 3}} and list(oldest["generators"]) == ["numpy"]
    lines = describe_unknown(oldest, "also", "generators", "callbacks")
    assert [line.split(" ")[0] for line in lines] == ["numbers", "what"]
    assert "(torch)" in lines[0] and "what Mine had learned" in lines[1]
    assert oldest["callbacks"][0] == {"kind": "Mine", "attributes": {}}
    assert oldest["callbacks"][1]["attributes"]["history"] == {"loss": [1 / 3]}


def test_an_object_that_was_too_large_is_named():
    fits = PastFits()
    fits.end(1, record(1, also={"seen": {"n": 1}, "buffer": None}))
    found = fits.find(1)
    assert found is not None and found["also"] == {"seen": {"n": 1}}
    (line,) = describe_unknown(found, "also", "generators", "callbacks")
    assert line.startswith("what buffer of `also` was like after a fit that is over is not known")


def test_evaluations_give_what_they_gave_and_old_ones_are_told_of():
    told: list[str] = []
    first = Evaluations(told.append)
    for call in range(1, 10_001):
        first.keep((1, call, 0), [0.5 * call, 1.0])
    again = Evaluations(told.append)
    again.restore(first.capture())
    assert again.knows((1, 10_000, 0)) and again.find((1, 10_000, 0)) == [5000.0, 1.0]
    assert not again.knows((1, 10_000, 1)) and not told, "it was never made"
    assert not again.knows((1, 5, 0)) and len(told) == 1
    assert count_bytes_written(again.capture()) < 400_000
    again.keep((1, 10_000, 0), [7.0, 1.0])
    assert again.find((1, 10_000, 0)) == [7.0, 1.0]
