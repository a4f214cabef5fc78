"""Function style or plain style: the first draw from a prepared loader, or the first call, decides for the run."""

from __future__ import annotations

from collections.abc import Callable

from duoka.collectives.collective import Collective
from duoka.errors import CheckpointError, MismatchError
from duoka.strategies.borders import Borders


class Styles:
    def __init__(self, collective: Collective, borders: Borders, tell_once: Callable[..., None]) -> None:
        self._collective, self._borders, self._tell_once = collective, borders, tell_once
        self.is_function = False
        self.is_plain = False

    def choose_function(self) -> None:
        """Called by `strategy.backward`, and where a pass over `strategy.batches` begins."""
        if self.is_function:
            return
        if self.is_plain:
            raise MismatchError(
                "strategy.backward and strategy.batches cannot follow a plain loop over a prepared loader.",
                why="the first loop decides how a script trains, and this one has trained by loss.backward().",
                do="train by strategy.backward everywhere, or nowhere.",
            )
        if self._borders.is_state_wanted:
            raise CheckpointError(
                "strategy.checkpoint does not save loops of strategy.backward yet.",
                do="leave strategy.checkpoint out, or train in a plain loop over the prepared loader.",
            )
        self.is_function = True
        if self._collective.num_replicas > 1:
            self._tell_once("function style: what strategy.backward is given runs once per replica")
        if self._collective.joining is not None:
            self._collective.joining.refuse(
                "what a loop of strategy.backward keeps between calls is not known to Duoka"
            )

    def refuse_number(self, call: str) -> None:
        """`strategy.sum`, `.mean` and `.gather` have no place in function style."""
        if self.is_function:
            raise MismatchError(
                f"strategy.{call} was called in a script that trains by strategy.backward.",
                why="code outside of the function has the numbers of the whole batch on every worker.",
                do="return it from the function: (loss, {'name': (sum, count)}), or strategy.rows(tensor).",
            )

    def choose_plain(self) -> None:
        """Called where a plain loop over a prepared loader begins."""
        if self.is_function:
            raise MismatchError(
                "A plain loop over a prepared loader follows calls of strategy.backward.",
                why="in function style a loader's batches are global, and a plain loop would see one worker's samples.",
                do="write `for batch in strategy.batches(loader):`; for an evaluation use strategy.evaluate(function,"
                " loader), or loop over a loader that is not prepared: every worker then reads all of it.",
            )
        self.is_plain = True
