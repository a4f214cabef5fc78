"""A worker's line to its supervisor: what is heard on it at any time, and the waits that the supervisor hears of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from duoka.collectives.patience import Link, Pace, Patience
from duoka.errors import Stopped


@dataclass(frozen=True)
class Offer:
    """A newcomer that waits to join where so many calls between steps lie behind."""

    number: int
    worker: int
    records: int
    is_for_epoch: bool = False  # it can join between two epochs only


class Expired(Exception):
    """The supervisor has found nobody to blame for the wait under way, which would not end by itself."""


class Supervision:
    def __init__(self, link: Link, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._pace = Pace()
        self._waits = 0  # numbers them, so that word about an earlier one does not count
        self._is_asked = False  # the supervisor wants to know where this worker is
        self.left: dict[int, int] = {}  # those that have finished their script, and the calls they took part in
        self.offers: dict[int, Offer] = {}  # the newest of each newcomer that was heard of

    def obey(self, message: dict[str, Any]) -> None:
        """What may be said at any time, whatever this worker waits for. Raises Stopped, Expired."""
        if message["kind"] == "stop":
            raise Stopped(message.get("why", ""))
        if message["kind"] == "left":
            self.left[int(message["worker"])] = int(message["completed"])
        if message["kind"] == "offer":
            number, worker, records = (int(message[name]) for name in ("number", "worker", "records"))
            offer = Offer(number, worker, records, bool(message["is_for_epoch"]))
            self.offers[offer.worker] = offer
        if message["kind"] == "where":
            self._is_asked = True
        if message["kind"] == "expired" and int(message["wait"]) == self._waits:
            raise Expired

    def end_step(self) -> float:
        """To how many seconds steps lengthen deadlines."""
        self._pace.end_step(self._clock())
        return self._pace.lengthen(0.0)

    def begin_wait(self, phase: str, deadline_s: float, step: int) -> Patience:
        """To be ended by whoever begins it. `phase`: what the missing ones have not done."""
        self._waits += 1
        facts = {"phase": phase, "step": step, "wait": self._waits}
        return Patience(self._link, self._clock, deadline_s, self._pace.lengthen, facts)

    def tell(self, patience: Patience, missing: Sequence[int]) -> None:
        """Say who is missing, if it is time to, or if the supervisor has asked."""
        if self._is_asked:
            self._is_asked = False
            patience.answer(missing)
        patience.tell(missing)

    def wait_for_word(self, patience: Patience, missing: Sequence[int] = ()) -> dict[str, Any]:
        """The next thing that the supervisor says, however long that takes."""
        while True:
            self.tell(patience, missing)
            message = self._link.receive(patience.left())
            if message is not None:
                return message
