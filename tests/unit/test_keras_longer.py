"""A `fit` that was over when the run was saved, and is asked for other epochs."""

from __future__ import annotations

import pytest

from duoka.errors import CheckpointError
from duoka.frameworks.keras.longer import goes_on

RECORD = {"epochs": 2, "is_stopped": False, "calls": 14}
TRAININGS = {"fits": 1, "calls": 14, "is_open": False, "end": {"epoch": 2}}


def ask(num_epochs: int, record: dict = RECORD, **trainings) -> bool:
    return goes_on(record, TRAININGS | trainings, 1, num_epochs, "mine")


def test_a_fit_goes_on_with_more_epochs_and_is_over_with_the_same():
    assert ask(3) and not ask(2)


def test_a_fit_that_a_callback_has_stopped_is_over_however_many_epochs_it_is_asked_for():
    stopped = RECORD | {"is_stopped": True}
    assert not ask(9, stopped) and not ask(2, stopped)
    with pytest.raises(CheckpointError, match="was over after 2 epochs"):
        ask(1, stopped)


@pytest.mark.parametrize(
    ("num_epochs", "trainings", "why"),
    [
        (1, {}, "an earlier epoch"),
        (3, {"end": None}, "its end has changed the model"),
        (3, {"calls": 15}, "training went on after it"),
        (3, {"fits": 2}, "training went on after it"),
        (3, {"is_open": True}, "training went on after it"),
    ],
)
def test_other_epochs_that_cannot_be_had_exactly_are_refused_with_the_reason(num_epochs, trainings, why):
    with pytest.raises(CheckpointError, match=rf"(?s)asked for {num_epochs} now.*{why}.*ask for 2 epochs there"):
        ask(num_epochs, **trainings)
