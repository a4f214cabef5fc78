"""The collective of one host: workers that share memory, and wake one another through the kernel.

One worker is the same code with nobody to wait for and memory of its own (see `solo.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from duoka.collectives.answers import Answers, Pack, Replayed, T, Unpack
from duoka.collectives.arena import Arena
from duoka.collectives.arrays import Array, as_array, check_alike, check_out, check_weights, deliver, sum_dtype
from duoka.collectives.board import BEFORE_LINE, Work
from duoka.collectives.buffers import SharedBuffer
from duoka.collectives.caller import STEP, find_line
from duoka.collectives.collective import Buffer, Collective, Exchange, Op
from duoka.collectives.dealing import Dealing
from duoka.collectives.decision import Decision, Difference, Regrouped
from duoka.collectives.exchange import Moment, SharedExchange
from duoka.collectives.joining import Joining
from duoka.collectives.meeting import ARRIVED, TAKEN, Meeting
from duoka.collectives.passing import broadcast, gather
from duoka.collectives.reducing import Terms, reduce
from duoka.collectives.staging import Staging
from duoka.errors import JoinLater, MismatchError, WorkerLost
from duoka.topology.placement import Placement


def _no_moment(name: str) -> None:
    pass


class SharedMemory(Collective):
    def __init__(
        self,
        meeting: Meeting,
        arena: Arena,
        num_replicas: int,
        *,
        deadline_s: float = 60.0,
        moment: Moment = _no_moment,
        describe: Callable[[int], str] = "worker {}".format,
    ) -> None:
        self.worker = meeting.worker
        self.num_replicas = num_replicas
        self.meeting = meeting
        self.deadline_s = deadline_s
        self.moment = moment  # called at every point where a worker could die; tests let it die there
        self.joining: Joining | None = None  # set where lost workers may come back
        self.staging = Staging(arena, num_replicas)
        self.dealing = Dealing(meeting, num_replicas)
        self._arena = arena
        self._describe = describe
        self._held = 0
        self._number = 0
        self._failure: BaseException | None = None
        self._named: dict[tuple[int, np.dtype[Any], str], SharedBuffer] = {}

    @property
    def placement(self) -> Placement:
        return self.dealing.placement

    @property
    def main(self) -> int:
        return self.meeting.membership.main

    @property
    def workers(self) -> tuple[int, ...]:
        return self.dealing.workers

    def ask_main(self, *, is_between: bool) -> bool:
        """Between steps the role has moved as soon as the main one is gone, without waiting for anybody."""
        if not is_between:
            return self.worker == self.main
        self.meeting.end_work()
        return self.worker == self.meeting.read_main()

    @property
    def own_replicas(self) -> tuple[int, ...]:
        return self.dealing.placement_in(self.next_number).replicas_of(self.worker)

    # Juniors.

    @property
    def compares_juniors(self) -> bool:
        return self.dealing.compares_juniors

    @property
    def shadows(self) -> tuple[int, ...]:
        shadow = self.dealing.find_shadow()
        return (shadow.replica,) if shadow is not None and self.worker in shadow.juniors else ()

    @property
    def juniors(self) -> tuple[int, ...]:
        return self.meeting.membership.juniors

    def note_agreed(self) -> None:
        self.dealing.compare_all()

    def remove(self, workers: Sequence[int], difference: Difference) -> None:
        with self.failing_for_good():
            while odd := [worker for worker in workers if worker in self.meeting.membership.workers]:
                try:
                    self.meeting.part_from(odd, difference, self.deadline_s)
                except Regrouped as regrouped:
                    self.dealing.adopt(regrouped.decision)

    def yield_if_junior(self, difference: Difference) -> None:
        if self.worker in self.juniors:
            with self.failing_for_good():
                self.meeting.yield_to_others(difference, self.deadline_s)

    # What a call consists of.

    @property
    def next_number(self) -> int:
        return self._number + 1

    def begin(self, description: str) -> int:
        """Number the next call and say what it is. Ends the validity of a shared result."""
        self.check_usable()
        self.release()
        if self._number > self.meeting.completed:
            # After a loss the call before is to be done again: those who wait in it would take this one for it.
            with self.failing_for_good():
                raise self._open_error()
        self._number += 1
        joining, call = self.joining, description.encode()
        if not description.startswith(STEP) and (line := find_line(description)):
            call += BEFORE_LINE + line.encode()
        if joining is None:
            self.meeting.begin(self._number, call)
        else:
            if joining.is_newcomer:
                raise _too_early(description)
            self.meeting.begin(self._number, call, joining.offer_to_write())
        return self._number

    @contextmanager
    def failing_for_good(self) -> Iterator[None]:
        """A call that was left by an error cannot be followed by another: the others may still be in it."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    def check_usable(self) -> None:
        """In a forked child nothing may be touched: its numbers of descriptors may mean the user's files by now."""
        self.meeting.refuse_children()
        if self._failure is not None:
            raise self._failure

    def part_from_odd_calls(self, number: int, workers: Iterable[int], deadline_s: float) -> None:
        """Before a call is compared for good: a junior that calls something else is removed.

        The call is not completed then. It is done again without that one, by the rules for a loss.
        """
        if not self.juniors:
            return
        calls = self.meeting.calls(number, workers)
        odd = self.meeting.membership.find_odd(calls)
        if not odd or any(calls[worker].startswith(b"broadcast") for worker in odd):
            return  # a broadcast writes where the parts of others lie
        own, theirs = (calls[w].decode(errors="replace") for w in (odd[0], next(w for w in calls if w not in odd)))
        what = f"called {own[:120]!r}, where the others called {theirs[:120]!r}"
        difference = Difference("calls", what, f"{what}\nits: {own}\ntheirs: {theirs}")
        self.meeting.part_from(odd, difference, deadline_s)

    def compare_calls(self, number: int, workers: Iterable[int]) -> None:
        """All workers see the same calls here, so either all of them raise or none."""
        calls = self.meeting.calls(number, workers)
        if len(set(calls.values())) > 1:
            self.complete(number)
            named = {self._describe(worker): call.decode(errors="replace") for worker, call in calls.items()}
            lines = self.meeting.lines(number, calls)
            told = {
                worker: f"{named[self._describe(worker)]}{f' at {line}' if line else ''}"
                for worker, line in lines.items()
            }
            error = MismatchError(
                f"The workers did not call the same thing (call {number}, step {self.meeting.steps}).",
                why="\n".join(f"{self._describe(worker)}: {call}" for worker, call in told.items()),
                do="let every worker run the same calls with the same shapes and types."
                f"{_hint_at_main(calls, self.main, lines)}",
            )
            error.calls = named
            raise error
        if self.joining is not None:
            self.joining.compare_offers(number, calls)

    def complete(self, number: int) -> None:
        self.meeting.complete(number)

    def enter(self, unproven: Sequence[int], on_probation: Sequence[int]) -> None:
        """This worker has joined, and continues where the others are."""
        self._number = self.meeting.completed
        self.dealing.deal_to(self.worker, unproven, on_probation)

    def work_on(self, step: int, replicas: Sequence[int], *, is_left: bool = False) -> None:
        self.meeting.work_on(Work.of(step, replicas, is_left))

    def end_step(self) -> None:
        if self.joining is not None:
            if self.joining.is_newcomer:
                return
            self.joining.end_step()
        self.meeting.end_step()
        self.dealing.end_step()

    def hold(self, number: int) -> None:
        self._held = number

    def release(self) -> None:
        """Say that the last result has been taken: the others may write their slots again."""
        if self._held:
            self.meeting.refuse_children()
            self.meeting.say(self._held, TAKEN)
            self._held = 0

    def meet_once(self, number: int, deadline_s: float | None, can_redo: Callable[[], bool]) -> Placement:
        """The one meeting of a small call. Returns who had placed what when it was completed."""
        with self.failing_for_good():
            if self.dealing.is_lost(number) and not can_redo():
                raise self.lost_error(None, number)
            while True:
                placement, workers = self.placement, self.workers
                try:
                    self.moment("arriving")
                    self.meeting.meet(number, ARRIVED, self._deadline(deadline_s))
                    self.part_from_odd_calls(number, workers, self._deadline(deadline_s))
                    self.compare_calls(number, workers)
                    return placement
                except Regrouped as regrouped:
                    self.dealing.adopt(regrouped.decision)
                    if regrouped.decision.completed >= number:
                        self.compare_calls(number, workers)
                        return placement
                    if not can_redo():
                        raise self.lost_error(regrouped.decision, number) from None

    def _deadline(self, deadline_s: float | None) -> float:
        return self.deadline_s if deadline_s is None else deadline_s

    def lost_error(self, decision: Decision | None, number: int) -> WorkerLost:
        decision = decision or self.dealing.last_loss
        lost = [] if decision is None else [self._describe(w) for w in decision.lost]
        who = f"{', '.join(lost)} {'was' if len(lost) == 1 else 'were'} lost" if lost else "A worker was lost"
        return WorkerLost(
            f"{who} in call {number} at step {self.meeting.steps}, with values that only it had.",
            why="a plain collective cannot compute another worker's value again.",
            do="exchange what a step needs within the step (strategy.sum_over_replicas): lost replicas are redone.",
        )

    def _open_error(self) -> WorkerLost:
        return WorkerLost(
            f"A worker was lost at step {self.meeting.steps}, and this step cannot be done again.",
            why="it goes on to another call between workers, which the lost replicas have not come to.",
            do="start again from the last checkpoint (strategy.checkpoint writes them, and goes on from the newest).",
        )

    # The calls.

    def _answer(self, name: str, call: Callable[[], T], pack: Pack[T], unpack: Unpack[T]) -> T:
        """Plain calls between steps are written down for newcomers."""
        return call() if self.joining is None else self.joining.answer(name, call, pack, unpack)

    def barrier(self, *, deadline_s: float | None = None) -> None:
        self._answer("barrier", lambda: self._barrier(deadline_s), lambda _: [], lambda _: None)

    def _barrier(self, deadline_s: float | None) -> None:
        if self.joining is not None and self.joining.is_arriving:
            return
        number = self.begin("barrier")
        self.meet_once(number, deadline_s, lambda: True)
        self.complete(number)

    def buffer(self, count: int, dtype: Any, name: str = "") -> SharedBuffer:
        self.check_usable()
        key = int(count), np.dtype(dtype), name
        if name and key in self._named:
            return self._named[key]
        made = SharedBuffer(self._arena, self.num_replicas, int(count), dtype, name)
        if name:
            self._named[key] = made
        return made

    def scratch(self, count: int, dtype: Any, purpose: str = "step") -> SharedBuffer:
        """A buffer for this purpose, used again by later calls; sizes are rounded up, so that they do not pile up."""
        capacity = 1 << max(0, count - 1).bit_length()
        return self.buffer(capacity, dtype, f"scratch of {purpose}").use(count)

    def await_main(self, is_done: Callable[[], bool]) -> bool:
        self.check_usable()
        while self.main != self.worker:
            try:
                self.meeting.await_deed(self.main, self.next_number, is_done, self.deadline_s)
                return True
            except Regrouped as regrouped:
                self.dealing.adopt(regrouped.decision)
        return is_done()

    def common(self, nbytes: int) -> Array:
        self.check_usable()
        return self._arena.reserve(nbytes, "what one worker hands to all").bytes[:nbytes]

    def exchange(self, buffers: Sequence[Buffer], name: str = "", deadline_s: float | None = None) -> Exchange:
        shared = [buffer for buffer in buffers if isinstance(buffer, SharedBuffer)]
        assert len(shared) == len(buffers), "buffers come from this collective's buffer()"
        if len({id(buffer) for buffer in shared}) < len(shared):
            raise MismatchError("One exchange was given the same buffer twice.", do="make a buffer for each.")
        answers = None if self.joining is None else self.joining.answers
        call = f"exchange {name}".strip()
        if answers is not None and answers.is_replaying:
            return Replayed(answers, _title(call, shared), shared)
        return self.open_exchange(call, shared, deadline_s, can_redo=True, answers=answers)

    def open_exchange(
        self,
        call: str,
        buffers: Sequence[SharedBuffer],
        deadline_s: float | None,
        *,
        can_redo: bool,
        answers: Answers | None = None,
    ) -> SharedExchange:
        self.check_usable()
        self.release()
        with self.failing_for_good():
            self._wait_until_taken(max([buffer.last_exchange for buffer in buffers], default=0), deadline_s)
        return SharedExchange(self, buffers, _title(call, buffers), can_redo=can_redo, answers=answers)

    def _wait_until_taken(self, number: int, deadline_s: float | None) -> None:
        while number:
            try:
                return self.meeting.wait(number, TAKEN, self._deadline(deadline_s))
            except Regrouped as regrouped:
                self.dealing.adopt(regrouped.decision)

    def all_reduce(
        self,
        values: Sequence[Any],
        op: Op = "sum",
        *,
        weights: Sequence[float] | None = None,
        out: Any = None,
        deadline_s: float | None = None,
    ) -> Array:
        arrays = [as_array(value) for value in self._check_given(values, "values")]
        given = self._check_weights(op, weights)
        like = check_alike(arrays)
        if like.dtype.kind in "iu" and (op == "mean" or weights is not None):
            raise MismatchError(f"Values of {like.dtype} cannot be weighted.", do="convert them to float64 first.")
        target = check_out(out, like)
        call = f"all_reduce {op} of {like.dtype}{list(like.shape)}"

        def carry_out() -> Array:
            flat, total = reduce(self, call, Terms(arrays, given, sum_dtype(like.dtype)), deadline_s)
            deliver(flat.reshape(like.shape), target, total if op == "mean" else None)
            self.release()
            return target

        return self._answer(call, carry_out, lambda result: [result], lambda answer: _fill(target, answer[0]))

    def _check_given(self, values: Sequence[Any], what: str) -> Sequence[Any]:
        if len(values) != len(self.replicas):
            raise MismatchError(
                f"{len(values)} {what} for the {len(self.replicas)} replicas of {self._describe(self.worker)}.",
                do="give one for each replica that this worker runs, in order (strategy.local_replicas).",
            )
        return values

    def _check_weights(self, op: str, weights: Sequence[float] | None) -> list[float | None]:
        if op not in ("sum", "mean"):
            raise MismatchError(f"There is no {op!r} over replicas.", do='use "sum" or "mean".')
        if weights is None:
            return [1.0 if op == "mean" else None] * len(self.replicas)
        return check_weights(self._check_given(weights, "weights"))

    def all_gather(self, values: Sequence[Any], *, deadline_s: float | None = None) -> list[Array]:
        return self._answer(
            "all_gather", lambda: gather(self, self._check_given(values, "values"), deadline_s), list, list
        )

    def broadcast(self, value: Any = None, *, root: int = 0, deadline_s: float | None = None) -> Array:
        if not 0 <= root < self.num_replicas:
            raise MismatchError(f"There is no replica {root}.", do=f"use one of 0 to {self.num_replicas - 1}.")
        call = f"broadcast from replica {root}"
        return self._answer(call, lambda: broadcast(self, value, root, deadline_s), lambda a: [a], lambda a: a[0])

    def refuse_loss_of(self, workers: Iterable[int], number: int) -> None:
        """Between the parts of a call: the rest of what a lost worker had to give will never come."""
        if not set(self.meeting.membership.workers).issuperset(workers):
            with self.failing_for_good():
                raise self.lost_error(None, number)


def _hint_at_main(calls: Mapping[int, bytes], main: int, lines: Mapping[int, str]) -> str:
    """Said where the main worker alone has called something else."""
    if sum(call == calls[main] for call in calls.values()) > 1:
        return ""
    where = f" at {lines[main]}" if lines[main] else ""
    return (
        f"\nThe main worker alone made its call{where}. If that stands under `if strategy.is_main:`, move it out, and"
        " keep only what prints or writes there."
    )


def _too_early(call: str) -> JoinLater:
    return JoinLater(
        f"A replacement worker called {call!r} before it had come to the loop of its epoch.",
        why="the other workers are inside that loop, and do not make this call.",
        do="move the call behind the loop, or before strategy.epochs.",
    )


def _title(call: str, buffers: Sequence[SharedBuffer]) -> str:
    return f"{call} of {', '.join([buffer.title for buffer in buffers])}" if buffers else call


def _fill(target: Array, answer: Array) -> Array:
    np.copyto(target, answer)
    return target
