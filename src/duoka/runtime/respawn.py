"""New workers in the place of lost ones: started, offered to the members, and joined with them at a step border.

The supervisor's side of `collectives/joining.py`. It alone numbers generations. A newcomer is nobody's business until
it has joined: its death or failure is one line on the screen, and the run goes on as it was.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Protocol

from duoka.runtime.decisions import Standing
from duoka.topology.membership import Membership

MOST_STARTS = 3  # of one worker, after its first
MOST_REMOVALS = 2  # of one worker, for the same reason
_NOT_JOINED = ("CannotJoin", "JoinLater")
_MOST_GIVERS = 2  # that are lost, by whatever, while they hand over their state to the same newcomer


class Newcomer(Protocol):
    number: int
    pid: int
    failure: dict[str, Any] | None


class Host(Protocol):
    """What the supervisor does for it."""

    @property
    def membership(self) -> Membership: ...

    def start_newcomer(self, number: int) -> Newcomer: ...

    def tell_member(self, number: int, message: dict[str, Any]) -> None: ...

    def tell_newcomer(self, newcomer: Any, message: dict[str, Any]) -> None: ...

    def admit(self, newcomer: Any, membership: Membership) -> None:
        """From now on this is a worker like any other."""
        ...

    def describe(self, number: int) -> str: ...


class _Stage(Enum):
    OFFERED = "the members have heard of it, and stop at a border once all have agreed"
    GIVING = "all members stand at the border, and one writes down its state"
    TAKING = "the newcomer reads it"
    SETTLED = "the newcomer has it"


@dataclass
class _Round:
    offer: int
    newcomer: Newcomer
    records: int
    since: float  # this stage
    stage: _Stage = _Stage.OFFERED
    due: float | None = None
    patience_s: float = 60.0
    at_border: dict[int, Standing] = field(default_factory=dict)
    giver: int | None = None  # while it writes down its state
    lost_givers: int = 0
    step: int = 0  # at which it joins, as the user counts
    facts: dict[str, Any] = field(default_factory=dict)  # of all members, for the newcomer


class Respawn:
    def __init__(
        self,
        host: Host,
        say: Callable[[str], None],
        clock: Callable[[], float],
        *,
        is_wanted: bool,
        deadline_s: float = 60.0,
    ) -> None:
        self._host, self._say, self._clock, self._deadline_s = host, say, clock, deadline_s
        self._is_wanted = is_wanted
        self._reason: str | None = None  # why the program cannot be joined; "": it can; None: nobody has said
        self._vacant: set[int] = set()
        self._starts: Counter[int] = Counter()
        self._newcomers: dict[int, Newcomer] = {}
        self._rounds: dict[int, _Round] = {}
        self._num_offers = 0
        self._overran: set[int] = set()
        self._for_epoch: set[int] = set()  # workers that can join between two epochs only
        self._unready: dict[int, float] = {}  # newcomers that have not been ready yet, and when this is told
        self._given_up: list[Newcomer] = []  # and killed; everything has been said of them
        self._removals: Counter[tuple[int, str]] = Counter()

    def tell_overrun(self, number: int) -> None:
        if number not in self._overran:
            self._overran.add(number)
            self._say(
                f"{self._host.describe(number)} had rejoined, and was not done when the others were: its log has the"
                " rest. Count with strategy.step."
            )

    # What happens to workers.

    def on_lost(self, number: int, *, removed_for: str = "", is_own_doing: bool = False) -> None:
        """A member was lost, and the others have been told: those at a border come to it again.

        `removed_for`: why it was removed; after two removals for the same reason it is not started again. One that was
        ended by what it did itself, and handed over its state just then, is not to be followed by others.
        """
        if self._is_wanted:
            self._removals[number, removed_for] += bool(removed_for)
            if self._removals[number, removed_for] < MOST_REMOVALS:
                self._vacant.add(number)
            else:
                self._say(
                    f"{self._host.describe(number)} was removed {MOST_REMOVALS} times for the same reason, and is not"
                    " started again. Register what its script keeps from step to step:"
                    " state = strategy.register(name=value)."
                )
            for round in list(self._rounds.values()):
                round.at_border.clear()
                if round.stage is _Stage.GIVING:
                    round.lost_givers += round.giver == number
                    if round.lost_givers == _MOST_GIVERS or (round.giver == number and is_own_doing):
                        self._stop_giving(round, number)
                    round.stage, round.giver, round.since = _Stage.OFFERED, None, self._clock()

    def on_gone(self, newcomer: Newcomer, how: str, *, has_finished: bool = False) -> None:
        """A newcomer has ended before it had joined. One that `has_finished` its script would do so again."""
        self._forget(newcomer)
        if not self._is_wanted or any(newcomer is other for other in self._given_up):
            return
        error = "" if newcomer.failure is None else str(newcomer.failure["error"])
        who = self._host.describe(newcomer.number)
        if error == "CannotJoin":
            self._say(f"{who} could not join: {_first_line(newcomer.failure)}; the run goes on without it.")
            return
        if error == "JoinLater" and newcomer.number in self._for_epoch:
            self._say(f"{who} could not join: {_first_line(newcomer.failure)}; the run goes on without it.")
            return
        if error == "JoinLater":
            self._for_epoch.add(newcomer.number)
            self._starts[newcomer.number] -= 1
            self._say(f"{who} could not join in the middle of an epoch, and joins between two epochs instead.")
            self._vacant.add(newcomer.number)
            self.fill()
            return
        if has_finished:
            self._say(f"{who} has come to the end of its script before it had joined; the run goes on without it.")
            return
        what = f"failed with {error}" if error else how
        self._say(f"{who} {what} before it had joined; its log has the rest.")
        self._vacant.add(newcomer.number)
        self.fill()

    @property
    def has_newcomers(self) -> bool:
        return bool(self._newcomers)

    @property
    def has_vacancies(self) -> bool:
        """Somebody is to be started in the place of a lost one, when the others have agreed."""
        return self._is_wanted and bool(self._vacant)

    def finish(self) -> None:
        """Somebody has come to the end of the script. That a worker comes back was said: so is that it does not."""
        if self._is_wanted:
            for number in sorted(self._newcomers):
                self._say(f"the run ended before {self._host.describe(number)} had joined again.")
        self.end()

    def end(self) -> None:
        """The run is ending, or somebody has finished: nobody joins any more."""
        self._is_wanted = False
        self._unready.clear()
        for newcomer in list(self._newcomers.values()):
            _kill(newcomer)

    def fill(self) -> None:
        """Start new workers where some are lost, if that makes sense."""
        for number in sorted(self._vacant):
            if self._reason is None or not self._is_wanted:
                return  # nobody has said yet whether this program can be joined
            self._vacant.discard(number)
            if self._reason:
                self._say(f"{self._host.describe(number)} is not started again: {self._reason}.")
            elif self._starts[number] == MOST_STARTS:
                self._say(
                    f"{self._host.describe(number)} has been started again {MOST_STARTS} times;"
                    " the run goes on without it."
                )
            else:
                self._start(number)

    def _start(self, number: int) -> None:
        self._starts[number] += 1
        try:
            self._newcomers[number] = self._host.start_newcomer(number)
        except OSError as error:
            self._say(f"{self._host.describe(number)} cannot be started again: {error.strerror or error}.")
            return
        self._unready[number] = self._clock() + self._deadline_s
        self._say(f"{self._host.describe(number)} is started again, and joins when it is ready.")

    def _forget(self, newcomer: Newcomer) -> None:
        self._newcomers.pop(newcomer.number, None)
        self._unready.pop(newcomer.number, None)
        for round in [round for round in self._rounds.values() if round.newcomer is newcomer]:
            self._refuse(round)

    def list_awaited(self) -> set[int]:
        """The members that have not come to a border at which others stand, or have not handed over their state."""
        members, awaited = set(self._host.membership.workers), set()
        for round in self._rounds.values():
            if round.stage is _Stage.OFFERED and round.at_border:
                awaited |= members - set(round.at_border)
            if round.giver is not None:
                awaited.add(round.giver)
        return awaited

    def waits_since(self) -> float | None:
        """Since when a newcomer waits for members of whom none has come to a border."""
        waiting = [r for r in self._rounds.values() if r.stage is _Stage.OFFERED and not r.at_border]
        return min((round.since for round in waiting), default=None)

    def is_given_since(self) -> float | None:
        """Since when a member writes down its state."""
        return min((round.since for round in self._rounds.values() if round.giver is not None), default=None)

    # What they say.

    def on_message(self, number: int, newcomer: Newcomer | None, message: dict[str, Any]) -> None:
        """From a member, or, with it, from a newcomer."""
        kind = message["kind"]
        if kind == "joinable" and newcomer is None:
            self._hear_whether(str(message["reason"]))
        elif kind == "ready" and newcomer is not None:
            self._offer(newcomer, int(message["records"]))
        elif kind == "border":
            self._stand_at_border(number, message)
        elif kind in ("given", "settled", "later"):
            round = self._rounds.get(int(message["offer"]))
            if round is not None and kind == "given" and round.stage is _Stage.GIVING:
                self._hand_on(round, str(message["reason"]))
            elif round is not None and kind == "settled":
                round.stage, round.due = _Stage.SETTLED, None
                self._go_on(round)
            elif round is not None and kind == "later":
                self._refuse(round)  # it has seen how far the others are, and comes again when it is there

    def _hear_whether(self, reason: str) -> None:
        if self._reason is None or (reason and not self._reason):
            self._reason = reason
            if reason:
                for newcomer in list(self._newcomers.values()):
                    self._forget(newcomer)
                    self._vacant.add(newcomer.number)
                    _kill(newcomer)
            self.fill()

    def _offer(self, newcomer: Newcomer, records: int) -> None:
        self._unready.pop(newcomer.number, None)
        for round in [round for round in self._rounds.values() if round.newcomer is newcomer]:
            self._refuse(round)  # it waits at another place now
        self._num_offers += 1
        round = self._rounds[self._num_offers] = _Round(self._num_offers, newcomer, records, self._clock())
        for member in self._host.membership.workers:
            self._tell_offer(member, round)

    def _tell_offer(self, member: int, round: _Round) -> None:
        number = round.newcomer.number
        offer = {"number": round.offer, "worker": number, "records": round.records}
        offer["is_for_epoch"] = number in self._for_epoch
        self._host.tell_member(member, {"kind": "offer"} | offer)

    def _stand_at_border(self, number: int, message: dict[str, Any]) -> None:
        if int(message["generation"]) != self._host.membership.generation:
            return  # somebody was lost since: it will come again
        round = self._rounds.get(int(message["offer"]))
        if round is None:
            self._host.tell_member(number, {"kind": "refused", "offer": message["offer"]})
            return
        round.at_border[number] = Standing(int(message["completed"]), int(message["steps"]))
        round.facts = message["facts"]
        round.patience_s, round.step = 2 * float(message["deadline_s"]), int(message["step"])
        self._go_on(round)

    def _go_on(self, round: _Round) -> None:
        members = self._host.membership.workers
        if set(round.at_border) != set(members):
            return
        if len(set(round.at_border.values())) > 1:
            self._refuse(round)
        elif round.stage is _Stage.OFFERED:
            round.stage, round.giver = _Stage.GIVING, members[0]
            round.since = self._clock()
            self._host.tell_member(round.giver, {"kind": "give", "offer": round.offer})
        elif round.stage is _Stage.SETTLED:
            self._join(round)

    def _hand_on(self, round: _Round, reason: str) -> None:
        round.giver = None
        if reason:
            self._say(
                f"{self._host.describe(round.newcomer.number)} could not join: the state of this run cannot be handed"
                f" over ({reason}); the run goes on without it."
            )
            self._give_up(round.newcomer)
            return
        round.stage, round.due = _Stage.TAKING, self._clock() + round.patience_s
        self._host.tell_newcomer(round.newcomer, {"kind": "take", "offer": round.offer})

    def _stop_giving(self, round: _Round, giver: int) -> None:
        self._say(
            f"{self._host.describe(round.newcomer.number)} could not join: {self._host.describe(giver)} was lost while"
            " it handed over the state of this run; the run goes on without it."
        )
        self._give_up(round.newcomer)

    def _give_up(self, newcomer: Newcomer) -> None:
        self._given_up.append(newcomer)
        self._starts[newcomer.number] = MOST_STARTS
        self._forget(newcomer)
        _kill(newcomer)

    def _join(self, round: _Round) -> None:
        newcomer, standing = round.newcomer, next(iter(round.at_border.values()))
        before = self._host.membership.workers
        membership = self._host.membership.join(newcomer.number)
        del self._rounds[round.offer], self._newcomers[newcomer.number]
        self._host.admit(newcomer, membership)
        joined = {"kind": "joined", "offer": round.offer, "generation": membership.generation}
        joined |= {"workers": membership.workers, "juniors": membership.juniors, "facts": round.facts}
        joined |= asdict(standing)
        for member in (*before, newcomer.number):
            self._host.tell_member(member, joined)
        count = len(membership.workers)
        self._say(
            f"{self._host.describe(newcomer.number)} has rejoined at step {round.step};"
            f" {count} workers go on (generation {membership.generation})."
            " Of the script's own variables it has those that are registered (strategy.register)."
        )
        for other in self._rounds.values():
            other.at_border.clear()
            self._tell_offer(newcomer.number, other)

    def _refuse(self, round: _Round) -> None:
        del self._rounds[round.offer]
        for member in round.at_border:
            self._host.tell_member(member, {"kind": "refused", "offer": round.offer})

    # Time.

    def next_due(self) -> float | None:
        rounds = (round.due for round in self._rounds.values() if round.due is not None)
        return min((*rounds, *self._unready.values()), default=None)

    def see_to_late(self) -> None:
        """While a newcomer reads the state, the members wait for it: not for ever. Before that, nobody waits."""
        now = self._clock()
        for round in list(self._rounds.values()):
            if round.due is not None and now >= round.due:
                round.due = None
                _kill(round.newcomer)
        for number in [number for number, due in self._unready.items() if now >= due]:
            del self._unready[number]
            self._say(
                f"{self._host.describe(number)} was started again {self._deadline_s:g} s ago, and has not come to where"
                " it could join; nobody waits for it, and its log shows how far it is."
            )


def _kill(newcomer: Newcomer) -> None:
    try:
        os.kill(newcomer.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _first_line(failure: dict[str, Any] | None) -> str:
    """What a newcomer's own error said, out of its traceback."""
    lines = "" if failure is None else str(failure["traceback"])
    pairs = ((line, f"{name}: ") for line in lines.splitlines() for name in _NOT_JOINED)
    found = [line.partition(name)[2] for line, name in pairs if name in line]
    return found[-1].rstrip(".") if found else "its script does not fit"
