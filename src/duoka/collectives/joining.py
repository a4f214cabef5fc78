"""A worker takes the place of a lost one, at a step border, while the others train.

How all members come to the same border without a message for each step:
- A newcomer that has come to where the others are (see `answers.py`) is offered to the members by the supervisor,
  with a number, and with how many calls between steps it has been answered.
- Whoever has heard of the offer, and is as far, writes its number beside the next call of a step on the board. After
  the meeting of that call everybody reads what all wrote, also one that takes the result late, after a loss: if all
  wrote the same number, the offer is *agreed*, on all or on none.
- At the border that follows, members with an agreed offer stop and tell the supervisor. When all have come, one gives
  its state, the newcomer takes it, and only then the generation goes up, for all at once. Nobody passes the border
  before that, so a loss on the way changes nothing: the survivors are still at this border, and try again. A newcomer
  that dies, or cannot take the state, is refused, and was never a member.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from duoka.collectives.answers import Answers
from duoka.collectives.arrays import Array
from duoka.collectives.chronicle import Chronicle
from duoka.collectives.decision import Regrouped
from duoka.collectives.meeting import Meeting
from duoka.collectives.supervision import Offer
from duoka.errors import CannotJoin

if TYPE_CHECKING:
    from duoka.collectives.shm import SharedMemory

T = TypeVar("T")
Hand = Callable[[int], None]  # writes a state into this descriptor, or reads one from it
_LOOK_AGAIN_S = 0.05


class Later(Exception):
    """A newcomer that reads the state finds the others far ahead: they go on, while it does what brings it there."""


class Joining:
    """This worker's part in it: a member that lets others join, or a newcomer that wants to."""

    def __init__(self, collective: SharedMemory, chronicle: Chronicle, parcel: int, *, is_newcomer: bool) -> None:
        self._collective = collective
        self._meeting: Meeting = collective.meeting
        self._parcel = parcel
        self._answers = Answers(chronicle, self._wait_for_others, is_replaying=is_newcomer)
        self._written: Offer | None = None  # beside the call under way
        self._agreed: Offer | None = None
        self._told: str | None = None

    @property
    def is_newcomer(self) -> bool:
        """This worker runs the script, and does not take part yet."""
        return self._answers.is_replaying

    # Calls between steps.

    def answer(
        self,
        name: str,
        call: Callable[[], T],
        pack: Callable[[T], Sequence[Array]],
        unpack: Callable[[list[Array]], T],
    ) -> T:
        return self._answers.answer(name, call, pack, unpack)

    @property
    def answers(self) -> Answers | None:
        """For an exchange that is opened now: where its outcome is written down, or comes from."""
        return self._answers if self._answers.is_recording else None

    def unrecorded(self) -> Any:
        """For what a newcomer leaves out: the state that it is given makes up for it."""
        return self._answers.pausing()

    def mark(self, place: str, facts: dict[str, Any]) -> None:
        """All members come by this place of the script; see `pass_by`."""
        self._answers.mark(place, facts)

    # What the supervisor is told.

    def allow(self) -> None:
        """The state of this program is known: workers may come back."""
        self._declare("")

    def refuse(self, reason: str) -> None:
        """This program cannot be joined. The supervisor says so when a worker is lost."""
        if self.is_newcomer:
            raise CannotJoin(f"This program cannot be joined: {reason}.")
        if not self._told:
            self._declare(reason)
            self._answers.close()

    def _declare(self, reason: str) -> None:
        if self._told != reason:
            self._told = reason
            self._meeting.tell({"kind": "joinable", "reason": reason})

    # Members: how they agree.

    def offer_to_write(self) -> int:
        """What to write beside a call: the offer that this worker knows of and could accept."""
        self._written = None
        if self._meeting.offers and self._answers.is_in_step:
            fitting = (o for o in self._meeting.offers.values() if o.records == self._answers.num_passed)
            self._written = max(fitting, key=lambda offer: offer.number, default=None)
        return 0 if self._written is None else self._written.number

    def compare_offers(self, number: int, workers: Iterable[int]) -> None:
        """After the meeting of a call: the offer that all have written beside it, if they have.

        What is called between a step and the border after it says nothing: what was agreed on in the step stands.
        """
        if not self._answers.is_in_step:
            return
        mine = self._written
        is_agreed = mine is not None and all(self._meeting.offer_beside(w, number) == mine.number for w in workers)
        self._agreed = mine if is_agreed else None

    def border(
        self, give: Hand, take: Hand, step: Callable[[], int] | None = None, *, is_between_epochs: bool = False
    ) -> None:
        """A step is about to begin, and nothing of the last one is left to be done.

        `step` counts as the user does: the steps of a collective are evaluations, too.
        A newcomer comes back from here as a member, with the state that `take` has read.
        """
        if self.is_newcomer:
            self._join(take)
            self._answers.is_in_step = True
            return
        if self._agreed is not None and (is_between_epochs or not self._agreed.is_for_epoch):
            offer, self._agreed = self._agreed, None
            if offer.records == self._answers.num_passed:  # else all members are past the place where it waits
                self._let_join(offer, give, step or (lambda: self._meeting.steps))
        self._answers.is_in_step = True

    def begin_step(self) -> None:
        """This worker has rejoined at a boundary, where the others are."""
        self._answers.is_in_step = True

    def require_probation(self) -> None:
        """From now on a replacement has no replica until it has computed the same bits as an original worker.

        All workers say so before anybody joins, and make no call in which each of them has a value.
        """
        self._collective.dealing.has_probation = True

    def pause(self) -> None:
        """From now on no call leaves a record, and a newcomer makes none."""
        self._answers.pause()

    @property
    def is_arriving(self) -> bool:
        """This worker is a newcomer in a run whose calls are not recorded."""
        return self.is_newcomer and not self._answers.is_recording

    def end_step(self) -> None:
        self._answers.is_in_step = False

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """A step of the loop body under way ends, and another one of the same body follows: that is no border."""
        is_in_step = self._answers.is_in_step
        yield
        self._answers.is_in_step = is_in_step

    def _let_join(self, offer: Offer, give: Hand, step: Callable[[], int]) -> None:
        collective = self._collective
        collective.release()
        with collective.failing_for_good():
            while True:
                try:
                    collective.moment("at the border")
                    deadline_s = collective.deadline_s
                    facts = {"unproven": collective.dealing.unproven, "on_probation": collective.dealing.on_probation}
                    joined = self._meeting.let_join(offer.number, lambda: self._give(give), deadline_s, step(), facts)
                except Regrouped as regrouped:
                    collective.dealing.adopt(regrouped.decision)
                    continue
                self._meeting.offers.pop(offer.worker, None)
                if joined:
                    collective.dealing.deal_to(offer.worker, **facts)
                else:
                    os.ftruncate(self._parcel, 0)  # nobody takes it any more
                return

    def _give(self, give: Hand) -> None:
        self._collective.moment("giving")
        os.ftruncate(self._parcel, 0)
        os.lseek(self._parcel, 0, os.SEEK_SET)
        give(self._parcel)
        self._collective.moment("given")

    # Newcomers.

    def pass_by(self, place: str, take: Hand) -> dict[str, Any] | None:
        """A newcomer comes to a place that the others mark when they leave it.

        Returns the facts of the mark if they have left it; None if this worker has joined them there. Raises Later if
        `take` does: it has not joined, and nobody waits for it.
        """
        return None if self.join(take) else self._answers.take_mark(place)

    def join(self, take: Hand) -> bool:
        """Wait to be joined with the others. False: they have called or marked something that comes first."""
        while not self._answers.has_more():
            if self._offer(take):
                return True
        return False

    @property
    def is_behind(self) -> bool:
        """Whether the others have called or marked something that this newcomer has not come by yet."""
        return self._answers.has_more()

    def take_mark(self, place: str) -> dict[str, Any]:
        """The facts of the next mark of this place; waits until the others have come by it."""
        return self._answers.take_mark(place)

    def jump_to_last(self, place: str) -> dict[str, Any] | None:
        """Leave out what the others did before they came by this place for the last time until now."""
        return self._answers.jump_to_last(place)

    def _join(self, take: Hand) -> None:
        if not self._offer(take):
            raise CannotJoin("The others have called something between steps that this worker has not come by.")

    def _offer(self, take: Hand) -> bool:
        """Wait to be joined with the others. False: they have gone on meanwhile."""
        self._meeting.tell({"kind": "ready", "records": self._answers.num_passed})
        has_taken = False
        while has_taken or not self._answers.has_more():
            message = self._meeting.next_message(_LOOK_AGAIN_S)
            if message is None:
                continue
            if message["kind"] == "take":
                self._collective.moment("taking")
                try:
                    take(self._parcel)
                except Later:
                    self._meeting.tell({"kind": "later", "offer": message["offer"]})
                    raise
                has_taken = True
                self._meeting.tell({"kind": "settled", "offer": message["offer"]})
            elif message["kind"] == "joined":
                self._become_member(message)
                return True
        return False

    def _become_member(self, message: dict[str, Any]) -> None:
        os.ftruncate(self._parcel, 0)
        self._meeting.enter(message)
        self._answers.is_replaying = False
        self._collective.enter(**message["facts"])

    def _wait_for_others(self) -> None:
        self._meeting.next_message(_LOOK_AGAIN_S)


@contextmanager
def unrecorded(joining: Joining | None) -> Iterator[None]:
    """Calls that leave no record, whether anybody may join or not."""
    with nullcontext() if joining is None else joining.unrecorded():
        yield
