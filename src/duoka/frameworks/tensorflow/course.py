"""The course of a TensorFlow loop: when it begins, when a batch is handed out, when it is left. Iterators tell of it.

A border between steps is where the iterator that leads the loop is asked for its next batch, in Python: what the body
did with the last one is done then, whether it ran in graphs or not. Iterators that are drawn from within a body follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duoka.collectives.joining import Joining
from duoka.data.position import KEPT, LEFT_OUT, Epochs, walked_again
from duoka.errors import CheckpointError
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.few_rows import say_few_rows
from duoka.frameworks.tensorflow.capture import Capture
from duoka.frameworks.tensorflow.loader import Source, Walk
from duoka.frameworks.tensorflow.newcomers import Newcomers
from duoka.frameworks.tensorflow.state import Trained
from duoka.frameworks.tensorflow.turns import Progress
from duoka.strategies.borders import Borders

_UNSEEN = "strategy.run was given a batch that no loop in Python over strategy.distribute_dataset has handed out"


class Course:
    def __init__(
        self,
        borders: Borders,
        progress: Progress,
        checks: Checks,
        agreed: dict[int, Any],
        end_step: Callable[[], None],
        compare: Callable[[], None],
        trained: Trained,
        joining: Joining | None,
        tell: Callable[[str], None],
        num_replicas: int,
    ) -> None:
        self._borders, self._end_step, self._compare, self._tell = borders, end_step, compare, tell
        self._num_replicas = num_replicas
        self.epochs = Epochs(
            self._begin_epochs,
            self._begin_epoch,
            self._leave_out,
            self._end_epochs,
            self._end_stretch,
            self._come_by_finished,
            self._walk_again,
        )
        self._capture = Capture(progress, checks, agreed, self.epochs, trained, tell, borders.also)
        self._trail = self._capture.trail
        self._is_followed = joining is not None  # by workers that may come
        self._newcomers = Newcomers(joining, self._capture, borders.also)
        self._leader: int | None = None
        self._leads: Source | None = None  # what the leader goes through, or the last one
        self._unknown: str | None = None  # why it is not known where the loop is

    # What iterators tell.

    def begin_loop(self, source: Source) -> bool:
        if self._leader is not None:
            return False
        self._start()
        self._trail.begin_pass()
        self._capture.saves.begin_pass()
        self._newcomers.begin_pass(source)
        return True

    def leave_out(self) -> None:
        if self._borders.is_state_wanted:
            self._tell(LEFT_OUT)

    def _start(self) -> None:
        if self._is_followed or self._borders.is_state_wanted:
            self._capture.roster.begin()
        self._borders.at_start(self._capture)

    def begin_step(self, walk: Walk) -> None:
        if self._leader is None:
            self._leader, self._leads = id(walk), walk.source
            walk.source.passes.lead()
        if self._leader == id(walk):
            self._end_step()
            self._capture.arrive()
            self._capture.saves.begin_step()
            # Not in evaluations: a script that is resumed there would have come by its training without a batch.
            self._borders.at_border(self._capture, self._compare, is_training=walk.source.trains)

    def gave(self, walk: Walk) -> None:
        if self._leader == id(walk):
            self._capture.batch += 1

    def leave(self, walk: Walk) -> None:
        if self._leader == id(walk):
            self._leader = None
        if self._leader is None and walk.is_outer:
            self._end_step()
            if walk.source.passes.has_led:
                self._trail.end_pass()
            self._newcomers.end_pass(walk.source)

    def lose(self, why: str) -> None:
        self._unknown = self._unknown or why
        self._newcomers.refuse(f"{why}, so that where the others are in their data is not known")
        if self._borders.is_state_wanted:
            self._refuse(why)

    # What strategy.run tells.

    def see_run(self) -> None:
        if self._leader is None:
            self._newcomers.refuse(f"{_UNSEEN}, so that where the others are in their data is not known")

    def see_training(self) -> None:
        """A step is about to be exchanged. All workers come by here, so that all of them stop."""
        if self._borders.is_state_wanted and (self._unknown or self._leader is None):
            self._refuse(self._unknown or _UNSEEN)
        if self._leader is not None and self._leads is not None:
            self._leads.trains = True
            if self._leads.num_rows and (line := say_few_rows(self._leads.num_rows, self._num_replicas)):
                self._tell(line)

    @staticmethod
    def _refuse(why: str) -> None:
        raise CheckpointError(
            "strategy.checkpoint cannot save this loop.",
            why=f"{why}: where it is in its data is not known.",
            do="write `for batch in strategy.distribute_dataset(dataset): strategy.run(step, args=(batch,))` in Python;"
            " the step may be a tf.function, the loop around it may not be in one.",
        )

    # Loops over epochs.

    def _begin_epochs(self) -> None:
        if self.epochs.is_inside and self._borders.is_state_wanted:
            self._tell(KEPT)
        self._start()
        self._newcomers.begin_epochs()

    def _begin_epoch(self, is_resumed: bool) -> None:
        self._capture.begin_epoch(is_resumed)
        self._newcomers.begin_epoch(is_resumed)

    def _leave_out(self, goes_on: bool) -> bool:
        self._end_stretch()
        self._newcomers.come_by_finished(is_last=True)
        return self._capture.leave_out(goes_on)

    def _walk_again(self) -> None:
        if self._borders.is_state_wanted:
            raise walked_again()

    def _end_stretch(self) -> None:
        self._capture.end_stretch()

    def _come_by_finished(self) -> None:
        self._end_stretch()
        self._newcomers.come_by_finished(is_last=False)

    def _end_epochs(self) -> None:
        self._end_step()
        self._capture.end_epochs()
        self._end_stretch()
        self._borders.at_end(self._capture)

    def add_source(self) -> Source:
        return self._capture.add_source()
