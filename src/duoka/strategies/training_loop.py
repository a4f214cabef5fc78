"""The training loop: `strategy.epochs` or `strategy.steps`, its step boundaries, and how a run resumes in it.

A step boundary is a moment between two steps: all workers have done the same, and nothing is under way. State is saved
there, and replacement workers join there. Boundaries are

- between two epochs of `strategy.epochs`, and at its end,
- before each batch of the *first* loop over a loader in an epoch, and at the end of that loop,
- between two steps of `strategy.steps`.

A resumed script runs from its top. Finished epochs are skipped. The saved state is put in place when the interrupted
epoch is yielded, and once more when its first loop continues or ends: code in between runs a second time, and must not
count twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from duoka.errors import CheckpointError

EPOCHS, STEPS = "strategy.epochs", "strategy.steps"
BETWEEN, INSIDE, AFTER = "between epochs", "in the loop", "after the loop"


@dataclass(frozen=True)
class Position:
    """Where the script is at a boundary."""

    loop: str  # EPOCHS or STEPS
    number: int  # of the epoch or step under way; BETWEEN: of the one that follows
    place: str = BETWEEN
    leader: int = -1  # INSIDE and AFTER: the number of the loader of the first loop
    is_finished: bool = False  # the script has ended, with this loop left by `break`

    def describe(self) -> str:
        """
        >>> Position(EPOCHS, 2, INSIDE).describe(), Position(EPOCHS, 1).describe(), Position(STEPS, 40).describe()
        ('in epoch 2', 'after 1 epoch', 'after 40 steps')
        """
        if self.place == BETWEEN:
            unit = "epoch" if self.loop == EPOCHS else "step"
            return f"after {self.number} {unit}{'' if self.number == 1 else 's'}"
        return f"in epoch {self.number}" if self.place == INSIDE else f"in epoch {self.number}, after its loop"


class LoaderPass(Protocol):
    """One iteration over a loader."""

    @property
    def loader_number(self) -> int: ...


class Training(Protocol):
    """The framework's side."""

    def at_boundary(self) -> None:
        """All workers are at a boundary: save, let a worker join, stop."""
        ...

    def at_end(self) -> None:
        """The loop over epochs or steps has ended."""
        ...

    def begin_epoch(self) -> None:
        """An epoch or a step begins. Nothing of it has happened yet."""
        ...

    def put(self, state: dict[str, Any], *, is_again: bool) -> None:
        """Put all of this state in place. It may be put once more, and then `is_again`."""
        ...

    @property
    def is_state_wanted(self) -> bool:
        """Whether the run saves checkpoints."""
        ...

    @property
    def is_arriving(self) -> bool:
        """Whether this worker is a replacement that has not joined the run yet."""
        ...

    @property
    def is_restarted(self) -> bool:
        """Whether all workers were lost: a saved state is put in place where the loop begins."""
        ...

    def at_start(self, *, is_second: bool) -> None:
        """The loop over epochs or steps is about to begin; `resume` may still be called."""
        ...

    def arrive(self, epoch: int) -> dict[str, Any]:
        """A replacement worker has come to the loop of this epoch: it joins, and the state of now is returned."""
        ...

    def tell(self, text: str) -> None: ...


class TrainingLoop:
    """The one loop of a run in which it can be saved, resumed and joined."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.position: Position | None = None  # of the last boundary
        self._state: dict[str, Any] | None = None  # to be put in place
        self._has_put = False  # for the first time
        self._kind = ""  # of the loop that has begun
        self._is_over = False
        self.is_inside = False  # an epoch or step is under way
        self._leader: LoaderPass | None = None  # the first pass drawn from in this epoch
        self._is_leader_over = False

    @property
    def is_pending(self) -> bool:
        """Whether a saved state waits to be put in place, for the first or the second time, or is still to come."""
        return self._state is not None or self._training.is_arriving

    @property
    def is_on_the_way(self) -> bool:
        """Whether the script is not yet where the saved run was, also if its state is not known yet."""
        return self.is_pending or (self._training.is_restarted and not self.has_begun)

    @property
    def has_begun(self) -> bool:
        return bool(self._kind)

    @property
    def is_over(self) -> bool:
        """Whether the loop over epochs or steps has come to its end."""
        return self._is_over

    def resume(self, state: dict[str, Any]) -> None:
        """The script is to continue from this state."""
        self._state, self._has_put = state, False

    def finish(self) -> None:
        """The script has ended by itself, with its loop left by `break`: nothing is left to be trained."""
        assert self.position is not None
        self.position = replace(self.position, is_finished=True)

    # The loops.

    def epochs(self, num_epochs: int) -> Iterator[int]:
        return self._walk(EPOCHS, num_epochs)

    def steps(self, num_steps: int) -> Iterator[int]:
        return self._walk(STEPS, num_steps)

    def _walk(self, kind: str, count: int) -> Iterator[int]:
        if type(count) is not int or count < 0:
            raise CheckpointError(f"{kind}({count!r}).", do="pass a whole number, 0 or more.")
        self._begin(kind)
        for number in range(self._find_first(kind, count), count):
            self._begin_one(kind, number)
            try:
                yield number
            except GeneratorExit:  # the script has left the loop
                self.is_inside = False
                raise
            self._end_one(number)
        self._is_over = True
        if self._state is not None:
            self._put(is_last=True)
            self.position = Position(kind, count)
        else:
            self._come_to(Position(kind, count))
        self._training.at_end()

    def _begin(self, kind: str) -> None:
        if self._kind and self._training.is_state_wanted:
            raise CheckpointError(
                f"A second loop over {kind} begins in this run.",
                why=f"a run can be resumed in one loop, and it has had one over {self._kind}.",
                do="train in one loop over strategy.epochs or strategy.steps, and use range() for loops inside it.",
            )
        is_second, self._kind, self._is_over = bool(self._kind), kind, False
        self._training.at_start(is_second=is_second)

    def _find_first(self, kind: str, count: int) -> int:
        """The epoch or step at which this process begins."""
        if self._state is None:
            return 0
        position = self._saved_position()
        if position.loop != kind:
            raise CheckpointError(
                f"The saved run trains in a loop over {position.loop}, and this script in one over {kind}.",
                do=f"use {position.loop}, or begin a new run in another directory.",
            )
        num_begun = position.number + (position.place != BETWEEN)
        if position.is_finished:
            self._training.tell(
                f"this run is finished: its script ended in {position.describe().removeprefix('in ')}, by break or"
                " return. Nothing is trained; resume=False begins a new run"
            )
            return count
        if num_begun > count:
            unit = "epoch" if kind == EPOCHS else "step"
            raise CheckpointError(
                f"The saved run has begun {unit} {num_begun - 1}, and {kind} is called with {count}.",
                why="the weights of an earlier one are not there any more.",
                do=f"pass {num_begun} or more, or begin a new run in another directory.",
            )
        return position.number

    def _saved_position(self) -> Position:
        assert self._state is not None
        return Position(**self._state["position"])

    def _begin_one(self, kind: str, number: int) -> None:
        self._leader, self._is_leader_over = None, False
        self._training.begin_epoch()
        if self._state is None:
            self._come_to(Position(kind, number))
        else:
            self._put(is_last=self._saved_position().place == BETWEEN)
        self.is_inside = True

    def _end_one(self, number: int) -> None:
        self.is_inside = False
        if self._state is not None:
            raise CheckpointError(
                f"Epoch {number} has ended without the loop in which this run was saved.",
                why="the script took another way than in the saved run.",
                do="let every epoch begin with the same loop over strategy.batches(loader), or begin a new run in"
                " another directory.",
            )

    # The first loop over a loader in an epoch.

    def before_draw(self, loader_pass: LoaderPass) -> bool:
        """A pass over a loader is about to draw its next batch. Returns False if the saved run had ended this loop."""
        if self._kind != EPOCHS or not self.is_inside or self._is_leader_over:
            return True
        if self._leader is None:
            self._leader = loader_pass
        if self._leader is not loader_pass:
            return True
        if self._state is None:
            assert self.position is not None
            if self.position.place != INSIDE:
                self.position = Position(EPOCHS, self._number, INSIDE, loader_pass.loader_number)
            self._training.at_boundary()
            return True
        if self._training.is_arriving:
            self._state = self._training.arrive(self._number)
        position = self._saved_position()
        if position.leader != loader_pass.loader_number:
            raise CheckpointError(
                f"This run was saved in its loop over loader {position.leader}, and the epoch begins with one over"
                f" loader {loader_pass.loader_number}.",
                do="make and use the loaders in the same order as in the saved run, or begin a new run in another"
                " directory.",
            )
        self._put(is_last=True)
        self._is_leader_over = position.place == AFTER
        return not self._is_leader_over

    def check_inside(self) -> None:
        """Raise if the script trains where it could not be resumed. To be called in a run that saves checkpoints."""
        if not self.is_inside:
            raise CheckpointError(
                "This script trains outside of strategy.epochs and strategy.steps.",
                why="with strategy.checkpoint a resumed run continues in one of these loops.",
                do="write `for epoch in strategy.epochs(n):`, or `for step in strategy.steps(n):` around the training.",
            )

    def check_pass(self, loader_pass: LoaderPass) -> None:
        """Raise where a pass begins that could not be resumed."""
        if not self._training.is_state_wanted:
            return
        self.check_inside()
        if loader_pass.loader_number < 0:
            raise CheckpointError(
                "strategy.batches was called with a loader that is not prepared.",
                why="with strategy.checkpoint the position in every loader is saved.",
                do="pass the loader to strategy.prepare.",
            )

    def after_last(self, loader_pass: LoaderPass) -> None:
        """A pass has come to its end."""
        if self._leader is loader_pass and self.is_inside and not self._is_leader_over:
            self._is_leader_over = True
            self._come_to(Position(EPOCHS, self._number, AFTER, loader_pass.loader_number))

    @property
    def _number(self) -> int:
        assert self.position is not None
        return self.position.number

    def _come_to(self, position: Position) -> None:
        self.position = position
        self._training.at_boundary()

    def _put(self, *, is_last: bool) -> None:
        assert self._state is not None
        state, is_again = self._state, self._has_put
        self.position, self._has_put = self._saved_position(), True
        if is_last:
            self._state = None
        self._training.put(state, is_again=is_again)

    def capture(self) -> dict[str, Any]:
        assert self.position is not None
        return asdict(self.position)
