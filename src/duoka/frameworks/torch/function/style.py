"""Function style or plain style: the first draw from a prepared loader, or the first call, decides for the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from duoka.collectives.collective import Collective
from duoka.errors import MismatchError


class Styles:
    def __init__(
        self,
        collective: Collective,
        begin: Callable[[], None],
        tell_once: Callable[..., None],
        *,
        is_synced: bool = False,
    ) -> None:
        self._collective, self._begin, self._tell_once = collective, begin, tell_once
        self._is_synced = is_synced
        self.is_function = False
        self.is_plain = False
        self._is_accumulating = False  # strategy.accumulate was called

    def choose_function(self) -> None:
        """Called by `strategy.backward`, and where a pass over `strategy.batches` begins."""
        if self.is_function:
            return
        if self.is_plain:
            raise MismatchError(
                "strategy.backward or strategy.batches was called after a plain loop over a prepared loader.",
                why="the first loop over a prepared loader decides the style of a script. A plain loop, be it training"
                " or evaluation, sees the samples of one worker.",
                do="train by `for batch in strategy.batches(loader):` and strategy.backward everywhere. For an"
                " evaluation use strategy.evaluate(function, loader), or loop over a loader that is not prepared.",
            )
        if self._is_accumulating:
            self._refuse_accumulation()
        if self._is_synced and self._collective.num_replicas > 1:
            raise MismatchError(
                "sync_batchnorm=True has no effect on functions passed to strategy.backward yet.",
                why="BatchNorm would normalise each replica's samples by themselves.",
                do="leave sync_batchnorm out, or train in a plain loop over the prepared loader.",
            )
        self.is_function = True
        if self._collective.num_replicas > 1:
            self._tell_once("function style: strategy.backward runs the function once per replica")
        self._begin()

    def accumulate(self, num_batches: int) -> None:
        """Called by `strategy.accumulate`, which is for plain loops."""
        self._is_accumulating = num_batches > 1
        if self._is_accumulating and self.is_function:
            self._refuse_accumulation()

    def _refuse_accumulation(self) -> NoReturn:
        raise MismatchError(
            "strategy.accumulate was called in a script that trains by strategy.backward.",
            why="the loop runs once for each batch, and every call adds to p.grad.",
            do="divide the loss by k, and call optimizer.step() and optimizer.zero_grad() after every k-th batch.",
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
                "A plain loop over a prepared loader was begun in a script that trains by strategy.backward.",
                why="a plain loop sees the samples of one worker: its sums and means would be those of that worker.",
                do="for an evaluation use strategy.evaluate(function, loader), or loop over a loader that is not"
                " prepared: every worker then reads all of it. To train, write `for batch in"
                " strategy.batches(loader):`.",
            )
        self.is_plain = True
