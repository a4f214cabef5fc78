"""Which worker runs which replica: dealt at a border of steps, moved when a worker is lost in the middle of one.

After a loss only the lost replicas move. All replicas are dealt anew at the border that follows, or when a worker
has rejoined at one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from duoka.collectives.decision import Decision
from duoka.collectives.meeting import Meeting
from duoka.collectives.trial import NOBODY, Kind, Trial
from duoka.topology.placement import Placement, place


def _no_deal(placement: Placement) -> None:
    pass


class Dealing:
    def __init__(self, meeting: Meeting, num_replicas: int) -> None:
        self._meeting = meeting
        self._num_replicas = num_replicas
        # A newcomer is dealt to as if it were a member already: it may read its rows while it comes near.
        members = sorted({*meeting.membership.workers, meeting.worker})
        self._dealt = self.placement = place(num_replicas, members)  # placement: who runs which replica, now
        self._deal_anew = False
        self._adopt_later: list[Decision] = []
        self._lost_call = 0
        self._before_loss = self.placement
        self._newcomer: int | None = None  # who has joined last
        self._untried: set[Kind] = set()  # what it computes that has not been compared yet
        self._compared: set[Kind] = set()  # in this step
        self._is_excused = False
        self.are_bits_promised = True  # else two that compute the same may differ
        self.last_loss: Decision | None = None
        self.on_deal: Callable[[Placement], None] = _no_deal  # called when replicas have been dealt anew

    @property
    def homes(self) -> tuple[int, ...]:
        """The first replica of each share as they were dealt; unchanged while lost replicas move."""
        return self._dealt.homes

    def find_trial(self, kind: Kind | None = None) -> Trial | None:
        """While something, or this, of what a newcomer computes is still to be compared with an older one's."""
        newcomer, workers = self._newcomer, self.placement.workers
        if not self._untried or (kind is not None and kind not in self._untried):
            return None
        if newcomer is None or newcomer not in workers or len(workers) == 1 or not self.are_bits_promised:
            return None
        witness = NOBODY if self._is_excused else self._meeting.ages.sort(workers)[0]
        return Trial(newcomer, self._dealt.replicas_of(newcomer)[0], witness)

    def excuse_witness(self) -> None:
        """This worker cannot compute another replica beside its own."""
        self._is_excused = True

    def end_trial(self, kind: Kind) -> None:
        """The numbers have been handed in that were to be compared. Within this step, others may follow."""
        self._compared.add(kind)

    def pass_border(self) -> None:
        """The next step of training begins: all that is evaluated between two of them was compared."""
        self._untried -= self._compared

    def is_lost(self, number: int) -> bool:
        """Whether values of a lost worker were due in this call."""
        return number == self._lost_call

    def placement_in(self, number: int) -> Placement:
        """By whom the values of this call are given."""
        return self._before_loss if self.is_lost(number) else self.placement

    def adopt(self, decision: Decision) -> None:
        """After a loss only the lost replicas move, until the border of the step in which the furthest survivor is.

        One that takes a result late is still a step behind: it moves them once it has come to that step.
        """
        self.last_loss = decision
        if self._lost_call != decision.completed + 1:
            # Whoever was further has come to this call with the values of the old placement: it fails for all.
            self._lost_call, self._before_loss = decision.completed + 1, self.placement
        if decision.steps > self._meeting.steps:
            self._adopt_later.append(decision)
        else:
            self.placement = self.placement.without(decision.lost)
            self._deal_anew = True

    def deal_to(self, workers: Sequence[int], newcomer: int) -> None:
        """A worker has rejoined at this border: replicas are dealt to all, and what was lost before is made up for."""
        self._adopt_later, self._lost_call = [], 0
        self._deal(workers)
        self._newcomer, self._is_excused = newcomer, False
        self._untried, self._compared = set(Kind), set()

    def _deal(self, workers: Iterable[int]) -> None:
        # Replica 0, and what goes with it, is not for one that has come back while others have been there all along.
        self._dealt = self.placement = place(self._num_replicas, self._meeting.ages.sort(workers))
        self._deal_anew = False
        self.on_deal(self.placement)

    def end_step(self) -> None:
        """The border of a step has come; the meeting has counted it."""
        self._untried -= self._compared & {Kind.STEP}
        if self._deal_anew:
            self._deal(self.placement.workers)
        postponed, self._adopt_later = self._adopt_later, []
        for decision in postponed:
            self.adopt(decision)
