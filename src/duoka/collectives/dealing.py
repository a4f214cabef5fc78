"""Which worker runs which replica: dealt at a border of steps, moved when a worker is lost in the middle of one.

After a loss only the lost replicas move. All replicas are dealt anew at the border that follows, or when a worker
has rejoined at one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from duoka.collectives.decision import Decision
from duoka.collectives.meeting import Meeting
from duoka.collectives.shadow import Shadow
from duoka.topology.placement import Placement, place


def _no_deal(placement: Placement) -> None:
    pass


class Dealing:
    def __init__(self, meeting: Meeting, num_replicas: int) -> None:
        self._meeting = meeting
        self._num_replicas = num_replicas
        # By seniority, also those lost since. A replacement reads its samples ahead as if it were a member already.
        self._order = tuple(dict.fromkeys((*meeting.membership.workers, meeting.worker)))
        self._dealt = self.placement = place(num_replicas, self._order)  # placement: who runs which replica, now
        self._deal_anew = False
        self._adopt_later: list[Decision] = []
        self._lost_call = 0
        self._before_loss = self.placement
        self.has_probation = False  # a replacement joins without replicas, until its bits have been compared
        self.on_probation: tuple[int, ...] = ()
        self.unproven: tuple[int, ...] = ()  # the juniors whose bits are compared in the next step
        self._proven: tuple[int, ...] = ()  # replicas are dealt to them at the next boundary
        self._to_promote: tuple[int, ...] = ()
        self.are_bits_promised = True  # else two that compute the same may differ
        self.last_loss: Decision | None = None
        self.on_deal: Callable[[Placement], None] = _no_deal  # called when replicas have been dealt anew

    @property
    def homes(self) -> tuple[int, ...]:
        """The first replica of each share as they were dealt; unchanged while lost replicas move."""
        return self._dealt.homes

    @property
    def workers(self) -> tuple[int, ...]:
        """Who takes part in calls, with or without replicas."""
        own = self.placement.workers
        return own if not self.on_probation else tuple(sorted({*own, *self.on_probation}))

    @property
    def compares_juniors(self) -> bool:
        return bool(self.unproven) and self.are_bits_promised

    def find_shadow(self) -> Shadow | None:
        """Which replica juniors compute, too, in the step that begins: the first one of an original worker."""
        membership = self._meeting.membership
        for replica in range(self._num_replicas) if self.compares_juniors else ():
            owner = self.placement.owner(replica)
            if owner in membership.workers and owner not in membership.juniors:
                return Shadow(replica, owner, self.unproven)
        return None

    def compare_all(self) -> None:
        """Weights have been compared. Juniors that compute the same in the step that begins are originals after it."""
        juniors = [worker for worker in self._meeting.membership.juniors if worker not in self.on_probation]
        if juniors and not self.are_bits_promised:
            self._meeting.promote(juniors)
            return
        self._to_promote = tuple(juniors)
        self.unproven = tuple(dict.fromkeys((*self.unproven, *self._to_promote)))

    def prove(self, juniors: Collection[int]) -> None:
        """These have computed the same bits as an original worker."""
        self.unproven = tuple(worker for worker in self.unproven if worker not in juniors)
        self._proven += tuple(worker for worker in self.on_probation if worker in juniors)
        if promoted := [worker for worker in self._to_promote if worker in juniors]:
            self._to_promote = tuple(worker for worker in self._to_promote if worker not in juniors)
            self._meeting.promote(promoted)

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
            self.on_probation, self.unproven, self._proven, self._to_promote = (
                tuple(worker for worker in group if worker not in decision.lost)
                for group in (self.on_probation, self.unproven, self._proven, self._to_promote)
            )
            self._deal_anew = True

    def deal_to(self, newcomer: int, unproven: Sequence[int], on_probation: Sequence[int]) -> None:
        """A worker has joined at this boundary: replicas are dealt to all, and what was lost before is made up for.

        `unproven`, `on_probation`: of those that have joined before, the same on all workers.
        """
        self._adopt_later, self._lost_call = [], 0
        self._order = self._meeting.membership.workers
        self.unproven, self._proven, self._to_promote = (*unproven, newcomer), (), ()
        # Where two that compute the same may differ, nothing is compared.
        self.on_probation = (*on_probation, newcomer) if self.has_probation and self.are_bits_promised else ()
        self._deal([worker for worker in self._order if worker not in self.on_probation])

    def _deal(self, workers: Collection[int]) -> None:
        # Replica 0, and what belongs to it, is the most senior worker's.
        self._dealt = self.placement = place(self._num_replicas, [w for w in self._order if w in workers])
        self._deal_anew = False
        self.on_deal(self.placement)

    def end_step(self) -> None:
        """The boundary of a step has come; the meeting has counted it."""
        if self._deal_anew or self._proven:
            self.on_probation = tuple(worker for worker in self.on_probation if worker not in self._proven)
            workers, self._proven = (*self.placement.workers, *self._proven), ()
            self._deal(workers)
        postponed, self._adopt_later = self._adopt_later, []
        for decision in postponed:
            self.adopt(decision)
