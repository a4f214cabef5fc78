"""Rejoin: a replacement worker takes the state of the run at its loop, and becomes a member at its batch.

It runs the script from its top. Where it comes to the loop over epochs or steps, a member hands it the state of the
next step boundary. If that boundary lies between two epochs, the worker has joined. Else it runs what the script does
before the loop of the interrupted epoch, and joins at that loop with the state of that moment. The rest is a resume.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duoka.checkpoint.files import load_state
from duoka.collectives.joining import Joining, Later
from duoka.errors import JoinLater
from duoka.frameworks.saving import list_codecs
from duoka.strategies.training_loop import BETWEEN

_MARK = "the beginning of training"
SECOND_LOOP = "it trains in a second loop over strategy.epochs or strategy.steps"
OUTSIDE = "it trains outside of strategy.epochs and strategy.steps"


class Rejoin:
    """One worker's part in it: a member that lets others join, or the replacement."""

    def __init__(self, joining: Joining | None, *, is_only_strategy: bool) -> None:
        self._joining, self._is_only_strategy = joining, is_only_strategy
        self._has_begun = self._has_allowed = False
        self.is_possible = joining is not None  # as far as is known

    @property
    def is_arriving(self) -> bool:
        """Whether this worker is a replacement that has not joined yet."""
        return self._joining is not None and self._joining.is_newcomer

    def begin(self) -> None:
        """The script trains in function style: from here on, calls between steps are not replayed."""
        joining = self._joining
        if joining is not None and not joining.is_newcomer and not self._has_begun:
            self._has_begun = True
            if not self._is_only_strategy:
                self.refuse("it trains with more than one strategy, and the state of one is not that of all")
                return
            joining.mark(_MARK, {})
            joining.pause()
            joining.require_probation()

    def follow(self) -> bool:
        """Whether the members of the run, whom this worker is to join, train in function style."""
        joining = self._joining
        if joining is None or not joining.is_newcomer:
            return False
        if joining.jump_to_last(_MARK) is None:
            return False
        joining.pause()
        joining.require_probation()
        self._has_begun = True
        return True

    def allow(self) -> None:
        """A member is at a boundary: its state can be had."""
        if self._joining is not None and self.is_possible and not self._has_allowed:
            self._has_allowed = True
            self._joining.allow()

    def refuse(self, reason: str) -> None:
        """This script cannot be joined. Logged when a worker is lost."""
        if self._joining is not None and not self._joining.is_newcomer:
            self.is_possible = False
            self._joining.refuse(reason)

    def await_state(self) -> dict[str, Any]:
        """At the begin of the loop: the state of the run."""
        return self._take(lambda position: position["place"] == BETWEEN)

    def join(self, epoch: int) -> dict[str, Any]:
        """At the loop of the interrupted epoch: the state with which this worker has joined."""
        state = self._take(lambda position: position["number"] == epoch and position["place"] != BETWEEN)
        if self.is_arriving:
            raise JoinLater(
                f"The other workers have ended epoch {epoch} before this one came to its loop.",
                do="nothing: Duoka starts it again, to join between two epochs.",
            )
        return state

    def _take(self, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Take the state of the next boundary, and join there if it `fits`."""
        joining, states = self._joining, []
        assert joining is not None

        def take(fd: int) -> None:
            states.append(load_state(f"/proc/self/fd/{fd}", list_codecs())["run"])
            if not fits(states[-1]["position"]):
                raise Later

        try:
            joining.join(take)
        except Later:
            pass
        else:
            joining.begin_step()
        found: dict[str, Any] = states[-1]
        return found
