"""Registered state: what a script may register, and how it is captured and restored."""

from __future__ import annotations

import random

import numpy as np
import pytest

from duoka.errors import CheckpointError
from duoka.strategies.registered_state import RegisteredState


class Tracker:
    def __init__(self) -> None:
        self.best = 1

    def state_dict(self) -> dict[str, int]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.best = state["best"]


def make(**things) -> RegisteredState:
    state = RegisteredState(lambda value: False)
    state.register(things)
    return state


def test_values_objects_and_generators_have_the_state_that_was_captured():
    tracker, own, legacy, python = Tracker(), np.random.default_rng(1), np.random.RandomState(1), random.Random(1)
    state = make(n=0, losses=[], by_name={"a": np.zeros(2)}, tracker=tracker, own=own, legacy=legacy, python=python)
    state.n, tracker.best = 3, 7
    state.losses.append(0.5)
    saved = state.capture()
    expected = own.random(), legacy.rand(), python.random()
    for _ in range(2):  # it may be restored twice
        state.n, tracker.best = 0, 0
        state.losses, state.by_name = ["other"], {}
        state.restore(saved)
        assert (state.n, state.losses, tracker.best) == (3, [0.5], 7)
        assert state.by_name["a"].tolist() == [0, 0]
        assert (own.random(), legacy.rand(), python.random()) == expected
    assert state.tracker is tracker and state.own is own


def test_what_is_restored_is_a_copy():
    state = make(losses=[1])
    saved = state.capture()
    state.restore(saved)
    state.losses.append(2)
    state.restore(saved)
    assert state.losses == [1]


@pytest.mark.parametrize("thing", [object(), {1, 2}, lambda: 0, [object()]])
def test_other_things_cannot_be_registered(thing):
    with pytest.raises(CheckpointError, match=r"(?s)'x' cannot be registered.*state_dict"):
        make(x=thing)


def test_only_registered_values_can_be_set():
    state = make(n=0, tracker=Tracker())
    with pytest.raises(AttributeError, match="'m' was not registered"):
        state.m = 1
    with pytest.raises(AttributeError, match="'tracker' is an object"):
        state.tracker = 1
    with pytest.raises(AttributeError, match="'m' was not registered"):
        print(state.m)
    with pytest.raises(CheckpointError, match="registered twice"):
        state.register({"n": 1})
    state.n = object()
    with pytest.raises(CheckpointError, match="'n' is a object now"):
        state.capture()


def test_another_kind_of_thing_under_a_name_is_an_error_and_one_sided_names_are_listed():
    saved = make(best=Tracker(), old=1).capture()
    assert make(best=Tracker(), new=1).check(saved) == [
        "'old' was registered in the saved run, and is not here",
        "'new' was not registered in the saved run",
    ]
    with pytest.raises(CheckpointError, match="'best' is registered as a value here, and was Tracker"):
        make(best=1).check(saved)
