"""Workers meet: each says how far it is and sleeps until all others are as far.

Past its deadline a wait goes on, and the supervisor watches who is missing (see `patience.py`).

When a worker is lost, the supervisor interrupts the meeting. Every survivor reports the last call it completed,
and then all get the same decision: the new generation, and the last call that anybody completed. The survivors
of a call that somebody completed take its result; the others do it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from duoka.collectives.board import BEFORE_LINE, Board, Work
from duoka.collectives.complaints import Complaints
from duoka.collectives.decision import Decision, Difference, Regrouped
from duoka.collectives.mailbox import WAKE, Mailbox, Message
from duoka.collectives.patience import Link, Patience
from duoka.collectives.supervision import Expired, Offer, Supervision
from duoka.errors import DeadlineExceeded, LaunchError, WorkerLeft
from duoka.topology.membership import Membership

# How far a worker is within one call. Told to others as 4 * call + phase.
ARRIVED, REDUCED, TAKEN = 0, 1, 2
_BETWEEN_LOOKS_S = 0.02
_BORDER_PATIENCE = 4.0  # how many times the deadline a border may take at which somebody joins: a state is copied
_PHASES = {ARRIVED: "arrived", REDUCED: "added its part", TAKEN: "taken the last result"}
NOT_AT_BORDER = "done its part at the border at which a worker joins"
LOCKED = "let go of a list that all workers write to"
UNDONE = "done what it does alone, for all (saving, mostly)"
UNFIT = "been taken out of the run"
UNDECIDED = "come to the end of what it was doing when a worker was lost"


class Meeting:
    def __init__(
        self,
        worker: int,
        membership: Membership,
        mailbox: Mailbox,
        board: Board,
        link: Link,
        *,
        describe: Callable[[int], str] = "worker {}".format,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self.membership = membership
        self.completed = 0
        self.steps = 0
        self._mailbox = mailbox
        self._board = board
        self._link = link
        self._clock = clock
        self._supervision = Supervision(link, clock)
        self._complaints = Complaints(worker, board, describe)
        self._others = tuple(w for w in membership.workers if w != worker)
        self._progress = dict.fromkeys(membership.workers, (-1, -1))
        self._standing = 0
        self._dropped: list[int] = []  # those that had finished when another one was lost
        self._dropped_juniors: set[int] = set()
        self._is_whole = membership == Membership(0, tuple(range(len(membership.workers))))
        self.work: Work | None = None  # what this worker computes, or has computed last
        self._pid = os.getpid()
        board.write_work(worker, Work())
        board.write_pace(worker, 0.0)
        board.write(worker, self._pid, 0, 0, 0)

    def refuse_children(self) -> None:
        if os.getpid() != self._pid:
            raise LaunchError(
                "A child process used the strategy of its parent.",
                why="it is no worker: its parent speaks for it.",
                do="call collectives in the process that made the strategy, not in loader workers or forked children.",
            )

    def process_of(self, worker: int) -> int:
        """The process id of a worker that has arrived somewhere."""
        return self._board.read(worker).pid

    def is_end_wished(self) -> bool:
        """Whether the run is to end at a border: the supervisor has been asked for it."""
        return self._board.is_end_wished()

    def read_main(self) -> int:
        """Who prints and writes for all, as the supervisor knows it: it hears of a loss first."""
        return self._board.read_main()

    def begin(self, number: int, description: bytes, offer: int = 0) -> None:
        """Leave word of what this worker calls: for comparison, and for the errors of those who wait for it."""
        self._board.write_call(self.worker, number, description, offer)
        self._board.write(self.worker, self._pid, number, self.completed, self.steps)
        if self._dropped:
            self._tell_early(number)

    def complete(self, number: int) -> None:
        self.completed = number
        self._board.write(self.worker, self._pid, number, number, self.steps)

    def work_on(self, work: Work) -> None:
        """Leave word of the replicas that are computed now: for whoever asks what killed this worker."""
        self.work = work
        self._board.write_work(self.worker, work)

    def end_work(self) -> None:
        if self.work is not None and os.getpid() == self._pid:  # a child that asks something does not end it
            self.work_on(Work(self.work.step))

    def end_step(self) -> None:
        self.end_work()
        self.steps += 1
        self._board.write_pace(self.worker, self._supervision.end_step())
        self._board.write(self.worker, self._pid, self.completed, self.completed, self.steps)

    def calls(self, number: int, workers: Iterable[int]) -> dict[int, bytes]:
        """What each of these workers called; to be read once all of them have arrived."""
        return {w: self._board.read_call(w, number).partition(BEFORE_LINE)[0] for w in workers}

    def lines(self, number: int, workers: Iterable[int]) -> dict[int, str]:
        """The lines of the script that made these calls, as far as they are known."""
        found = {w: self._board.read_call(w, number).partition(BEFORE_LINE)[2] for w in workers}
        return {w: line.decode(errors="replace") for w, line in found.items()}

    def offer_beside(self, worker: int, number: int) -> int:
        return self._board.read_offer(worker, number)

    def say(self, number: int, phase: int) -> None:
        """Tell the others how far this worker is."""
        self._standing = 4 * number + phase
        self._mailbox.send(self._others, Message(self.worker, self.membership.generation, self._standing))

    def wait(self, number: int, phase: int, deadline_s: float) -> None:
        """Sleep until all others are as far, however long it takes; past the deadline the supervisor sees to that.

        Raises Regrouped after a loss, WorkerLeft, and DeadlineExceeded when nobody can be blamed for the wait.
        """
        target = 4 * number + phase
        if not self._others and not self._is_whole:
            # The last one of several waits for nobody, but may be told things.
            self._hear(self._mailbox.receive(0), deadline_s)
        if not self._missing(target):
            return
        patience = self._begin_wait(_PHASES[phase], deadline_s)
        try:
            while missing := self._missing(target):
                self._supervision.tell(patience, missing)
                gone = [w for w in missing if w in self._supervision.left]
                # What they said before they left is in our pipe already, but perhaps not read yet.
                messages = self._mailbox.receive(0.0 if gone else patience.left())
                if gone and not messages:
                    self._part_from_gone(gone, number, deadline_s)
                    raise self._left_error(gone[0], number)
                self._hear(messages, deadline_s)
        except Expired:
            raise self.deadline_error(number, phase, deadline_s) from None
        finally:
            patience.end()

    def wait_at_most(self, number: int, phase: int, seconds: float) -> bool:
        """Whether all others are as far within these seconds. Raises Regrouped after a loss."""
        end = self._clock() + seconds
        while self._missing(4 * number + phase):
            messages = self._mailbox.receive(end - self._clock())
            if not messages and self._clock() >= end:
                return False
            self._hear(messages, seconds)
        return True

    def _begin_wait(self, phase: str, deadline_s: float, step: int | None = None) -> Patience:
        # As the user counts: our own steps are evaluations, too.
        if step is None:
            step = self.work.step if self.work is not None and self.work.is_under_way else self.steps
        return self._supervision.begin_wait(phase, deadline_s, step)

    @contextmanager
    def watch_lock(self, deadline_s: float) -> Iterator[Callable[[int], None]]:
        """For one who waits until another process lets go of a lock: past the deadline the supervisor hears of it.

        The line is not read meanwhile. When the holder is killed, the kernel releases the lock, and the wait ends.
        """
        patience = self._begin_wait(LOCKED, deadline_s)

        def tell(process: int) -> None:
            holder = self._board.find(process)  # not only a member: newcomers lock, too
            if holder is not None:  # else it has been released by now
                patience.tell([holder])

        try:
            yield tell
        finally:
            patience.end()

    def await_deed(self, doer: int, number: int, is_done: Callable[[], bool], deadline_s: float) -> None:
        """Until another worker has done something alone, has begun this call without doing it, or has ended.

        Raises Regrouped after a loss. Looks now and then: such things (files) take longer than a look.
        """
        patience = self._begin_wait(UNDONE, deadline_s)
        try:
            while not is_done() and self._board.read(doer).begun < number and doer not in self._supervision.left:
                self._supervision.tell(patience, [doer])
                self._hear(self._mailbox.receive(min(patience.left(), _BETWEEN_LOOKS_S)), deadline_s)
        except Expired:
            raise self.deadline_error(number, ARRIVED, deadline_s) from None
        finally:
            patience.end()

    def listen(self, deadline_s: float) -> None:
        """For one who waits for something else: hear what has been said until now. Raises Regrouped after a loss."""
        self._hear(self._mailbox.receive(0), deadline_s)

    def _hear(self, messages: Iterable[Message], deadline_s: float) -> None:
        for message in messages:
            if message.sender == WAKE:
                self._read_link(deadline_s)
            else:
                self._progress[message.sender] = message.generation, message.progress

    def deadline_error(self, number: int, phase: int, deadline_s: float) -> DeadlineExceeded:
        """Who is not as far as this, those first whose process is stopped: the others may be waiting for them, too."""
        missing = sorted(self._missing(4 * number + phase), key=self._complaints.is_alive) or [self.worker]
        num_others = len(self.membership.workers) - len(missing)
        return self._complaints.late(missing, _PHASES[phase], self.steps, deadline_s, num_others)

    def meet(self, number: int, phase: int, deadline_s: float) -> None:
        self.say(number, phase)
        self.wait(number, phase, deadline_s)

    def _missing(self, target: int) -> list[int]:
        now = self.membership.generation
        seen = ((w, *self._progress[w]) for w in self._others)
        return [w for w, generation, progress in seen if generation != now or progress < target]

    def _read_link(self, deadline_s: float) -> None:
        while (message := self._link.receive(0)) is not None:
            if message["kind"] == "lost":
                raise Regrouped(self._regroup(message, deadline_s))
            self._supervision.obey(message)

    def _regroup(self, message: dict[str, Any], deadline_s: float) -> Decision:
        """Report to the supervisor and wait for its decision, which all survivors have to come for."""
        patience = self._begin_wait(UNDECIDED, deadline_s)
        try:
            return self._wait_for_decision(message, patience)
        except Expired:
            raise self._complaints.undecided(self.steps) from None
        finally:
            patience.end()

    def _wait_for_decision(self, message: dict[str, Any], patience: Patience) -> Decision:
        generation = self._report(message)
        while True:
            answer = self._supervision.wait_for_word(patience)
            if answer["kind"] == "lost":
                generation = self._report(answer)  # a further loss: once more
            elif answer["kind"] == "decided" and int(answer["generation"]) == generation:
                return self._adopt(answer)
            else:
                self._supervision.obey(answer)

    def _report(self, message: dict[str, Any]) -> int:
        generation = int(message["generation"])
        standing = {"completed": self.completed, "steps": self.steps}
        self._link.send({"kind": "report", "generation": generation} | standing)
        return generation

    # Workers that differ from the others: a junior yields, and so does a minority.

    def promote(self, juniors: Sequence[int]) -> None:
        """These have computed the same as the others: they count as originals from now on."""
        self.membership = self.membership.promote(juniors)
        self._link.send({"kind": "promoted", "workers": list(juniors)})

    def part_from(self, odd: Sequence[int], difference: Difference, deadline_s: float) -> NoReturn:
        """Have the supervisor remove these, and wait for that: it raises Regrouped, as after any loss.

        Those who differ come here, too: a process that is about to be killed does nothing better than wait.
        """
        self._tell_difference(odd, difference)
        patience = self._begin_wait(UNFIT, deadline_s)
        try:
            while True:
                answer = self._supervision.wait_for_word(patience, [worker for worker in odd if worker != self.worker])
                if answer["kind"] == "lost":
                    raise Regrouped(self._regroup(answer, deadline_s))
                self._supervision.obey(answer)
        except Expired:
            raise self._complaints.still_there(odd[0], UNFIT, self.steps) from None
        finally:
            patience.end()

    def yield_to_others(self, difference: Difference, deadline_s: float) -> NoReturn:
        """This worker differs from the others, and knows it: it waits for its end."""
        while True:
            try:
                self.part_from([self.worker], difference, deadline_s)
            except Regrouped:
                continue  # another one was lost first

    def _tell_difference(self, odd: Sequence[int], difference: Difference) -> None:
        told = {"kind": "differs", "workers": list(odd), "generation": self.membership.generation}
        self._link.send(told | difference.as_fields())

    def _part_from_gone(self, gone: Sequence[int], number: int, deadline_s: float) -> None:
        odd = self.membership.find_odd({worker: worker in gone for worker in self.membership.workers})
        if odd and set(odd) <= set(gone):
            leaving = Difference("leaves", _tell_leaving(self.steps), str(self._left_error(odd[0], number)))
            self.part_from(odd, leaving, deadline_s)

    def _tell_early(self, number: int) -> None:
        """A junior that has finished without this call did so too early. Nobody waits for it."""
        early = [worker for worker in self._dropped if number > self._supervision.left[worker]]
        self._dropped = [worker for worker in self._dropped if worker not in early]
        for worker in early:
            if worker in self._dropped_juniors:
                leaving = _tell_leaving(self._board.read(worker).steps)
                self._tell_difference([worker], Difference("leaves", leaving, str(self._left_error(worker, number))))

    def _left_error(self, worker: int, number: int) -> WorkerLeft:
        return self._complaints.left(worker, self._supervision.left[worker], number)

    # Joining; see joining.py.

    @property
    def offers(self) -> dict[int, Offer]:
        """The newest of each newcomer that was heard of."""
        return self._supervision.offers

    def tell(self, message: dict[str, Any]) -> None:
        self._link.send(message)

    def next_message(self, timeout_s: float) -> dict[str, Any] | None:
        """What the supervisor has to say to a newcomer, waiting for at most this long."""
        message = self._link.receive(timeout_s)
        if message is not None:
            self._supervision.obey(message)
        return message

    def let_join(
        self, offer: int, give: Callable[[], None], deadline_s: float, step: int, facts: dict[str, Any]
    ) -> bool:
        """Stop at a border until everybody has, and the newcomer has the state. False: it is gone, or was refused.

        `step`: as the user counts, for what is said of it. `facts`: of all members, for the newcomer.
        Raises Regrouped after a loss: everybody is still at this border then, and comes here again.
        """
        standing = {
            "completed": self.completed,
            "steps": self.steps,
            "deadline_s": deadline_s,
            "step": step,
            "facts": facts,
        }
        deadline_s *= _BORDER_PATIENCE
        self._link.send({"kind": "border", "offer": offer, "generation": self.membership.generation} | standing)
        patience = self._begin_wait(NOT_AT_BORDER, deadline_s, step)
        self.begin(self.completed + 1, b"the border at which a worker joins")  # whatever it does alone, it has done
        try:
            return self._stand_at_border(offer, give, patience, deadline_s)
        except Expired:
            raise self._complaints.not_joined(step, deadline_s) from None
        finally:
            self._board.write(self.worker, self._pid, self.completed, self.completed, self.steps)
            patience.end()

    def _stand_at_border(self, offer: int, give: Callable[[], None], patience: Patience, deadline_s: float) -> bool:
        while True:
            answer = self._supervision.wait_for_word(patience)
            if answer["kind"] == "lost":
                raise Regrouped(self._regroup(answer, deadline_s))
            if answer["kind"] == "give":
                patience.begin_anew()  # from here on the others wait for this one
                self._link.send({"kind": "given", "offer": answer["offer"], "reason": _try(give)})
            elif answer["kind"] in ("joined", "refused") and int(answer["offer"]) == offer:
                if answer["kind"] == "joined":
                    self._enter_generation(answer)
                    self.say_standing(self._standing)
                return answer["kind"] == "joined"
            else:
                self._supervision.obey(answer)

    def enter(self, message: dict[str, Any]) -> None:
        """This newcomer is a member now, as far as the others are."""
        self._enter_generation(message)
        self.completed, self.steps = int(message["completed"]), int(message["steps"])
        self._board.write(self.worker, self._pid, self.completed, self.completed, self.steps)
        self.say(self.completed, TAKEN)

    def _enter_generation(self, answer: dict[str, Any]) -> None:
        workers, juniors = tuple(answer["workers"]), tuple(answer["juniors"])
        self.membership = Membership(int(answer["generation"]), workers, juniors)
        self._others = tuple(w for w in self.membership.workers if w != self.worker)
        for worker in self._others:
            self._progress.setdefault(worker, (-1, -1))

    def _adopt(self, answer: dict[str, Any]) -> Decision:
        before = self.membership
        self._enter_generation(answer)
        self._is_whole = False
        lost = tuple(w for w in before.workers if w not in self.membership.workers)
        completed = int(answer["completed"])
        self._dropped += [worker for worker in lost if worker in self._supervision.left]
        self._dropped_juniors |= set(lost) & set(before.juniors)
        self._tell_early(self._board.read(self.worker).begun)
        # What was said in the old generation no longer counts. Say again what still holds; a call that
        # is done again is announced again by whoever does it.
        self.say_standing(min(self._standing, 4 * self.completed + TAKEN))
        return Decision(self.membership, lost, completed, int(answer["steps"]))

    def say_standing(self, standing: int) -> None:
        self.say(standing >> 2, standing & 3)


def _tell_leaving(steps: int) -> str:
    return f"has finished its script at step {steps}, where the others go on"


def _try(give: Callable[[], None]) -> str:
    """Hand over the state; what keeps it from that is the newcomer's bad luck, and no reason for the run to end."""
    try:
        give()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:500]
    return ""
