"""A worker in the place of a lost one comes through the script: past what is finished, to where the others train.

Members of a run leave a mark when they begin an epoch of `strategy.epochs`, and when they have ended a pass over a
distributed dataset. A newcomer that comes to a pass with such a mark leaves it out; at the first one without it joins
the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from duoka.collectives.joining import Joining
from duoka.data.generators import as_plain, from_plain
from duoka.frameworks.handing import take
from duoka.frameworks.marks import describe_also, take_also
from duoka.frameworks.tensorflow.capture import Capture, capture_generators, restore_generators
from duoka.frameworks.tensorflow.loader import Source
from duoka.strategies.also import Also


class Newcomers:
    def __init__(self, joining: Joining | None, capture: Capture, also: Also) -> None:
        self._joining, self._capture, self._also = joining, capture, also
        self._has_joined = False

    @property
    def _is_led(self) -> bool:
        """This worker has joined, and is on its way to the batch at which it did: the others have left marks before."""
        return self._has_joined and self._capture.is_led

    def refuse(self, reason: str) -> None:
        if self._joining is not None:
            self._joining.refuse(reason)

    # Passes over datasets that lead a loop.

    def begin_pass(self, source: Source) -> None:
        """A member lets it be known that its state can be had; a newcomer leaves this pass out, or joins in it."""
        joining = self._joining
        if joining is None:
            return
        if not joining.is_newcomer:
            joining.allow()
            return
        facts = joining.pass_by(self._name(source), partial(take, self._capture, self._also))
        self._has_joined = facts is None
        if facts is not None:
            source.resume(facts["position"])
            self._count(facts)

    def end_pass(self, source: Source) -> None:
        joining = self._joining
        if joining is not None and not joining.is_newcomer and not self._is_led:
            joining.end_step()
            facts = {"position": source.capture()} | self._counts(with_also=source.passes.has_led)
            joining.mark(self._name(source), facts)

    def _name(self, source: Source) -> str:
        return f"the end of a pass over dataset {self._capture.number_of(source)}"

    # Loops over epochs.

    def begin_epochs(self) -> None:
        """A newcomer goes on with the epoch in which the others are."""
        joining, epochs = self._joining, self._capture.epochs
        if joining is None or not joining.is_newcomer:
            return
        facts = joining.jump_to_last(self._name_of_epochs(epochs.num_calls + 1))
        if facts is not None and facts.get("is_over"):
            epochs.resume({"call": epochs.num_calls + 2, "epoch": 0})
            if "positions" in facts:
                self._capture.resume_epoch(facts["start"], facts["positions"])
                for source in self._capture.sources:
                    source.passes.begin_resumed_epoch()
            restore_generators(from_plain(facts["generators"]))
            self._count(facts)
        elif facts is not None:
            epochs.resume({"call": epochs.num_calls + 1, "epoch": facts["epoch"]})
            self._capture.resume_epoch(facts["start"], facts["positions"])
            self._count(facts)

    def begin_epoch(self, is_resumed: bool) -> None:
        joining, epochs = self._joining, self._capture.epochs
        if joining is None or self._is_led:
            return
        name = self._name_of_epochs(epochs.num_calls)
        if not joining.is_newcomer:
            joining.mark(name, {"epoch": epochs.epoch} | self._capture.describe_epoch() | self._counts())
        elif not is_resumed:
            self._count(joining.take_mark(name))

    def come_by_finished(self, *, is_last: bool) -> None:
        """A run that is resumed leaves out a loop, and so do those who come to it.

        How many passes were over at its end is known of the last one; others are followed by it.
        """
        joining = self._joining
        if joining is not None and not joining.is_newcomer and not self._is_led:
            name = self._name_of_epochs(self._capture.epochs.num_calls)
            facts = {"is_over": True, "generators": as_plain(capture_generators())} | self._counts()
            joining.mark(name, facts | (self._capture.describe_epoch() if is_last else {}))

    @staticmethod
    def _name_of_epochs(call: int) -> str:
        return f"an epoch of loop {call}"

    def _counts(self, *, with_also: bool = True) -> dict[str, Any]:
        """Passes that only follow may end later than those whose bodies have changed the user's objects."""
        also = describe_also(self._capture.trail.last) if with_also else {}
        return {"step": self._capture.step, "batch": self._capture.batch} | also

    def _count(self, facts: dict[str, Any]) -> None:
        """What `strategy.step` and the user's objects show between loops."""
        self._capture.count(facts["step"], facts["batch"])
        take_also(self._also, facts)
