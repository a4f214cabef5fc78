"""The training loop: which boundaries a script comes to, and where a saved state is put in place."""

from __future__ import annotations

from typing import Any

import pytest

from duoka.errors import CheckpointError
from duoka.strategies.training_loop import AFTER, BETWEEN, INSIDE, TrainingLoop


class Training:
    """Notes what the loop asks for."""

    is_arriving = False
    is_restarted = False

    def __init__(self, *, is_state_wanted: bool = True) -> None:
        self.is_state_wanted = is_state_wanted
        self.loop = TrainingLoop(self)
        self.boundaries: list[tuple[str, int]] = []
        self.puts: list[tuple[str, bool]] = []
        self.told: list[str] = []

    def at_start(self, *, is_second: bool) -> None: ...

    def begin_epoch(self) -> None: ...

    def at_boundary(self) -> None:
        position = self.loop.position
        assert position is not None
        self.boundaries.append((position.place, position.number))

    def at_end(self) -> None: ...

    def put(self, state: dict[str, Any], *, is_again: bool) -> None:
        self.puts.append((state["name"], is_again))

    def tell(self, text: str) -> None:
        self.told.append(text)


class Pass:
    def __init__(self, number: int = 0) -> None:
        self.loader_number = number


def run_epoch(loop: TrainingLoop, num_batches: int, loader: int = 0) -> int:
    """One loop over a loader; returns how many batches came."""
    made, count = Pass(loader), 0
    while True:
        if not loop.before_draw(made):
            return count
        if count == num_batches:
            loop.after_last(made)
            return count
        count += 1


def state_at(place: str, number: int, **facts: Any) -> dict[str, Any]:
    position = {"loop": "strategy.epochs", "number": number, "place": place, "leader": -1 if place == BETWEEN else 0}
    return {"name": "saved", "position": position | facts}


def test_boundaries_lie_between_epochs_before_each_batch_and_after_the_first_loop():
    training = Training()
    for _ in training.loop.epochs(1):
        run_epoch(training.loop, 2)
        run_epoch(training.loop, 3)  # a validation
    assert training.boundaries == [(BETWEEN, 0), (INSIDE, 0), (INSIDE, 0), (INSIDE, 0), (AFTER, 0), (BETWEEN, 1)]
    assert training.loop.is_over


def test_a_run_that_was_saved_between_epochs_continues_with_the_next_one():
    training = Training()
    training.loop.resume(state_at(BETWEEN, 1))
    assert list(training.loop.epochs(3)) == [1, 2]
    assert training.puts == [("saved", False)]
    assert training.boundaries == [(BETWEEN, 2), (BETWEEN, 3)], "that of the save is not a boundary again"


def test_a_state_of_an_interrupted_loop_is_put_in_place_twice():
    training, batches = Training(), []
    training.loop.resume(state_at(INSIDE, 1))
    for epoch in training.loop.epochs(3):
        batches.append((epoch, run_epoch(training.loop, 2), list(training.puts)))
    assert batches[0] == (1, 2, [("saved", False), ("saved", True)]), "the loader itself continues at its batch"
    assert batches[1][2] == batches[0][2]


def test_a_loop_that_had_ended_yields_nothing():
    training, counts = Training(), []
    training.loop.resume(state_at(AFTER, 0))
    for _ in training.loop.epochs(2):
        counts.append((run_epoch(training.loop, 2), run_epoch(training.loop, 3)))
    assert counts == [(0, 3), (2, 3)]


def test_a_finished_run_trains_nothing_and_has_its_state():
    training = Training()
    training.loop.resume(state_at(INSIDE, 1, is_finished=True))
    assert list(training.loop.epochs(9)) == []
    assert training.puts == [("saved", False)] and "this run is finished" in training.told[0]


def test_steps_are_boundaries():
    training = Training()
    assert list(training.loop.steps(2)) == [0, 1]
    assert training.boundaries == [(BETWEEN, 0), (BETWEEN, 1), (BETWEEN, 2)]


@pytest.mark.parametrize(
    ("state", "count", "message"),
    [
        (state_at(INSIDE, 4), 4, "has begun epoch 4, and strategy.epochs is called with 4"),
        (state_at(BETWEEN, 2, loop="strategy.steps"), 4, "in a loop over strategy.steps, and this script in one over"),
    ],
)
def test_another_loop_than_that_of_the_saved_run_is_an_error(state, count, message):
    training = Training()
    training.loop.resume(state)
    with pytest.raises(CheckpointError, match=message):
        list(training.loop.epochs(count))


def test_an_epoch_without_the_loop_of_the_saved_run_is_an_error():
    training = Training()
    training.loop.resume(state_at(INSIDE, 0))
    with pytest.raises(CheckpointError, match="without the loop in which this run was saved"):
        list(training.loop.epochs(2))


def test_another_loader_than_that_of_the_saved_run_is_an_error():
    training = Training()
    training.loop.resume(state_at(INSIDE, 0))
    with pytest.raises(CheckpointError, match=r"saved in its loop over loader 0.*one over loader 1"):
        for _ in training.loop.epochs(2):
            run_epoch(training.loop, 1, loader=1)


def test_a_second_loop_and_training_outside_are_errors_where_state_is_saved():
    training = Training()
    list(training.loop.epochs(1))
    with pytest.raises(CheckpointError, match=r"A second loop over strategy\.steps"):
        list(training.loop.steps(1))
    with pytest.raises(CheckpointError, match="trains outside"):
        training.loop.check_pass(Pass())
    free = Training(is_state_wanted=False)
    list(free.loop.epochs(1))
    assert list(free.loop.epochs(2)) == [0, 1]


def test_a_loader_that_is_not_prepared_is_an_error_where_state_is_saved():
    training = Training()
    with pytest.raises(CheckpointError, match="not prepared"):
        for _ in training.loop.epochs(1):
            training.loop.check_pass(Pass(-1))
