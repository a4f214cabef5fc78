"""Who belongs to a run, generation by generation: the survivors of a loss agree, and newcomers are let in.

After a loss every survivor reports how far it is. When all have, they are told where the furthest is, and go on from
there. The supervisor alone numbers generations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from duoka.runtime.crew import Crew, Worker
from duoka.runtime.decisions import Standing, State, Vote
from duoka.runtime.output import Fold
from duoka.runtime.plan import Plan
from duoka.runtime.respawn import Respawn
from duoka.topology.membership import Membership


@dataclass(frozen=True)
class Missed:
    worker: int
    since: float
    may_sleep: bool  # between its steps: it may send files, or wait for something


class Members:
    def __init__(
        self, plan: Plan, crew: Crew, fold: Fold, say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._crew, self._fold, self._clock = crew, fold, clock
        self._membership = Membership(0, tuple(range(plan.num_workers)))
        self._juniors: set[int] = set()
        self._vote: Vote | None = None
        self._voting_since = 0.0
        self.respawn = Respawn(self, say, clock, is_wanted=plan.respawn, deadline_s=plan.deadline_s)

    @property
    def membership(self) -> Membership:
        return self._membership

    def has_running_original(self) -> bool:
        """Whether anybody is left whom others can rely on: juniors may differ, and are never main."""
        return any(w.number not in self._juniors for w in self._crew.list_running())

    def is_junior(self, number: int) -> bool:
        """Also of one that has ended, and that the others have regrouped without."""
        return number in self._juniors

    def promote(self, numbers: Iterable[int]) -> None:
        """These have agreed with the others at a comparison."""
        self._membership = self._membership.promote(set(numbers))
        self._juniors -= set(numbers)
        if self._vote is not None:
            self._vote.membership = self._membership

    def find_main(self) -> int:
        """The most senior worker that runs."""
        running = {worker.number for worker in self._crew.list_running()}
        return next(number for number in (*self._membership.workers, *running) if number in running)

    # After a loss.

    def regroup(self) -> None:
        """Tell the survivors that somebody was lost: they stop what they do, and report."""
        lost = {w.number for w in self._crew.workers.values() if w.state is not State.RUNNING}
        self._membership = self._membership.lose(lost)
        self._vote, self._voting_since = Vote(self._membership), self._clock()
        self._crew.watchman.start_over()
        self._tell_lost()
        self._move_main()

    def vote_again(self, worker: Worker) -> None:
        """Somebody finished while the others were deciding: do it without that one."""
        if self._vote is not None and worker.number in self._membership.workers and self._crew.list_running():
            self._membership = self._membership.lose({worker.number})
            self._vote = Vote(self._membership)
            self._tell_lost()

    def _tell_lost(self) -> None:
        for worker in self._crew.list_running():
            self._crew.tell(worker.number, {"kind": "lost", "generation": self._membership.generation})

    def hear_report(self, number: int, generation: int, standing: Standing) -> None:
        if self._vote is not None:
            self._vote.report(number, generation, standing)
            self._decide(self._vote)

    def _decide(self, vote: Vote) -> None:
        left = [w.standing for w in self._crew.workers.values() if w.state is State.LEFT]
        furthest = vote.outcome(left)
        if furthest is not None:
            members = vote.membership
            decided = {"kind": "decided", "generation": members.generation, "workers": members.workers}
            decided["juniors"] = members.juniors
            for worker in self._crew.list_running():
                worker.link.send(decided | asdict(furthest))
            self._vote = None
            self.respawn.fill()  # not before: the survivors come first

    def list_awaited(self) -> set[int]:
        """Those that the others wait for without knowing it: their reports, or that they come to a border."""
        if self._vote is not None:
            return set(self._vote.membership.workers) - set(self._vote.reports)
        return self.respawn.list_awaited()

    def find_missed(self) -> Missed | None:
        """The last one that is left, if its report is awaited, its state, or that it comes to a border.

        No other member is there to wait for it, and to say so.
        """
        if len(self._membership.workers) > 1:
            return None
        (last,), given_since = self._membership.workers, self.respawn.is_given_since()
        since = self.respawn.waits_since() if self._vote is None else self._voting_since
        if given_since is not None:
            return Missed(last, given_since, may_sleep=False)
        return None if since is None else Missed(last, since, may_sleep=True)

    def _move_main(self) -> None:
        self._fold.move_main(self.find_main())

    # What `Respawn` asks for.

    def start_newcomer(self, number: int) -> Worker:
        return self._crew.begin_newcomer(number, self._membership)

    def tell_member(self, number: int, message: dict[str, Any]) -> None:
        self._crew.tell(number, message)

    def tell_newcomer(self, newcomer: Worker, message: dict[str, Any]) -> None:
        newcomer.link.send(message)

    def admit(self, newcomer: Worker, membership: Membership) -> None:
        for worker in self._crew.list_alive():
            # What was printed before belongs to the old main worker, and to a newcomer's log.
            self._crew.read_outputs(worker)
        newcomer.state = State.RUNNING
        self._juniors.add(newcomer.number)
        self._membership = membership
        self._move_main()

    def describe(self, number: int) -> str:
        return self._crew.describe(number)
