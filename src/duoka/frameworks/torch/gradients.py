"""Gradients on their way from the replicas' backwards to the mean that everybody sees in `p.grad`.

Each backward of a body is a *round* with buffers of its own. A hook on every parameter writes the weighted
gradient into this replica's slot the moment autograd has it. When the outermost backward ends and all replicas of
this worker have deposited theirs, the round is committed, and `p.grad` shows the sum over all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from duoka.collectives.collective import Collective
from duoka.data.shares import share
from duoka.errors import MismatchError, WorkerLost
from duoka.frameworks.exchange.agreement import FirstWorker
from duoka.frameworks.torch.accumulation import Accumulation
from duoka.frameworks.torch.contributions import Contributions, weighed
from duoka.frameworks.torch.loop import Body, Loop
from duoka.frameworks.torch.note import Note, Notes, tell_story
from duoka.frameworks.torch.outside import Outside
from duoka.frameworks.torch.rounds import Round
from duoka.frameworks.torch.sparse import as_sparse, write_sparse
from duoka.frameworks.torch.statistics import Statistics
from duoka.frameworks.torch.tensors import as_bytes


class Gradients:
    def __init__(
        self,
        collective: Collective,
        loop: Loop,
        tell: Callable[[str, str], None],
        contributions: Contributions,
        rates: Callable[[], list[str]] = list,
    ) -> None:
        self._collective = collective
        self.ordinal = collective.count_up("gradients")
        self._loop = loop
        self._tell = tell
        self._contributions = contributions
        self._rates = rates
        self._names: list[str] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._index: dict[int, int] = {}
        self._sparse: list[int] = []
        self._statistics = Statistics([])
        self._hooks: list[Any] = []
        self._rounds: list[Round] = []
        self._outside: Outside | None = None
        self._grads_at_start: list[torch.Tensor | None] = []
        self._bases: list[torch.Tensor | None] = []  # what p.grad held before this backward
        self._added_to: set[int] = set()  # parameters whose gradient the first backward of a batch was added to
        self._not_exchanged: set[int] = set()  # parameters with a gradient from a backward outside of bodies
        self._values_of_moved: dict[int, torch.Tensor] = {}
        self._digest_at_start = 0
        self._depth = 0
        self._merged: Round | None = None  # has the statistics of all replicas, and has not put them into the model
        self.accumulation = Accumulation()
        self.moving: set[Any] = set()  # buffers that some body has changed: they travel
        self.last_calls: list[str] = []  # of the bodies of the last batch

    def watch(self, named: Sequence[tuple[str, torch.nn.Parameter]], sparse: set[int], statistics: Statistics) -> None:
        """From now on these are the parameters. Called again when layers were frozen, unfrozen or added."""
        for hook in self._hooks:
            hook.remove()
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._sparse = [index for index, parameter in enumerate(self._parameters) if id(parameter) in sparse]
        self._statistics = statistics
        statistics.keep_still()
        self._rounds, self._outside = [], None
        self._not_exchanged.clear()
        # After the gradient has been added to p.grad: hooks of the user's own have seen it by then.
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._make_hook(index)) for index, p in enumerate(self._parameters)
        ]

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            body = self._loop.body
            if body is None:
                self._not_exchanged.add(index)
            elif self._depth and not body.is_discarded:
                assert parameter.grad is not None
                self._take(index, parameter.grad.detach(), body)

        return hook

    def note_gradients(self) -> None:
        """Gradients that are there before anything was watched: nobody has exchanged them."""
        self._not_exchanged = {index for index, p in enumerate(self._parameters) if p.grad is not None}

    def watch_buffers(self) -> None:
        """A body begins: whoever changes a buffer that does not travel is noticed."""
        self._statistics.watch_still()

    # The course of a batch.

    def begin_batch(self) -> None:
        if self.accumulation.batches_before:
            for parameter in self._parameters:
                parameter.grad = None  # what came before is kept in sums of its own
        self._grads_at_start = [parameter.grad for parameter in self._parameters]
        self._statistics.begin_batch()
        self._digest_at_start = self._statistics.digest()
        self._values_of_moved = {}
        self._merged = None
        for round in self._rounds:
            round.forget()

    def begin_later_body(self) -> None:
        """Another replica of the same batch starts from where the first one did."""
        for parameter, grad in zip(self._parameters, self._grads_at_start, strict=True):
            parameter.grad = grad

    def enter_backward(self, roots: Sequence[torch.Tensor]) -> None:
        body = self._loop.body
        if self._depth == 0 and body is not None:
            self._loop.is_in_backward = True
            body.loss = _as_number(roots[0]) if roots else 0.0
            body.is_nan = body.is_nan or any(root.numel() == 1 and bool(root.isnan()) for root in roots)
            if body.has_called_step and not self._loop.runs_whole_shares and len(self._collective.replicas) > 1:
                with self._loop.noting_errors():
                    self._start_over_with_whole_shares(body)
            if body.backwards and self._loop.can_be_tried:
                if self._collective.shadows and not self._is_any_round_begun():
                    self._start_over(body)  # without the replica that is computed for comparison
                self._loop.has_several_backwards = True
            if not body.is_discarded:
                self._set_aside()
                if not body.backwards:
                    self._added_to = {index for index, base in enumerate(self._bases) if base is not None}
        self._depth += 1

    def _set_aside(self) -> None:
        """Keep what p.grad held: so that autograd leaves this backward's gradient alone there."""
        for round in self._rounds:
            round.taken.clear()
        self._bases = [parameter.grad for parameter in self._parameters]
        for index, parameter in enumerate(self._parameters):
            base = parameter.grad
            if base is not None and any(round.is_private(index, base) for round in self._rounds):
                self._bases[index] = base.clone()  # it lies where the result of this or a later round will be written
                if base is self._grads_at_start[index]:
                    self._grads_at_start[index] = self._bases[index]
            parameter.grad = None

    def list_added_to(self) -> set[int]:
        """Parameters whose gradients are not thrown away after a step: the last batch was added to them."""
        return {id(self._parameters[index]) for index in self._added_to if index < len(self._parameters)}

    def refresh(self) -> None:
        """Buffers have got other values, from a restored state."""
        self._statistics.keep_still()

    def _put_back(self, taken: set[int]) -> None:
        """Where no gradient came, p.grad is what it was."""
        for index, base in enumerate(self._bases):
            if index not in taken:
                self._parameters[index].grad = base

    def _start_over_with_whole_shares(self, body: Body) -> None:
        """A body steps and then goes on: its second half would not see what the first half of other replicas did."""
        if self._is_any_round_begun():
            raise self._cannot_redo()  # its replicas have become more: a worker was lost in this batch
        if body.replica != self._collective.replicas[0]:
            raise MismatchError(
                f"At step {self._loop.step} the body of replica {body.replica} steps more than once, others do not.",
                do="let the bodies of all replicas do the same.",
            )
        self._start_over(body)
        self._loop.runs_whole_shares = True
        self._tell(
            "this loop steps more than once per batch: each worker runs its rows as one batch."
            " The numbers are those of one device; equal bits need an equal number of workers",
            "whole shares",
        )

    def _is_any_round_begun(self) -> bool:
        return any(round.exchange is not None and round.exchange.is_begun for round in self._rounds)

    def _start_over(self, body: Body) -> None:
        body.is_discarded = True
        for round in self._rounds:
            round.forget()

    def leave_backward(self) -> None:
        self._depth -= 1
        body = self._loop.body
        if self._depth or body is None:
            return
        self._loop.is_in_backward = False
        if body.is_discarded:
            return
        round = self._rounds[body.backwards] if body.backwards < len(self._rounds) else None
        self._put_back(round.taken if round is not None else set())
        if round is None or not round.taken:
            return
        body.backwards += 1
        body.record("backward")
        if round.used is not None:
            # A later backward of this step met a loss, and its replicas run again: this one is done.
            self._show_sum(round, round.used)
        else:
            with self._loop.noting_errors():
                self._deposit(round, body)
                self._commit(round, body)
        body.forget_weight()

    def abandon_backward(self) -> None:
        """The backward raised: nothing of it counts."""
        self._depth -= 1
        self._loop.is_interrupted = True
        self._loop.is_in_backward = self._depth > 0
        if self._depth == 0 and self._loop.body is not None and not self._loop.body.is_discarded:
            self._put_back(set())

    def last_story(self) -> str:
        """What the bodies of the last batch did, at the end of a loop: no gradient follows to carry it."""
        return tell_story(self.last_calls, [], self._rates())

    def take_statistics(self) -> None:
        """Give the model what all replicas made of its statistics: with the update, or at the end of the batch.

        Not before: forwards of this body that are still to come begin from what its own ones have left, as those of
        other replicas do, which have run before anything was known.
        """
        if self._merged is not None:
            self._merged.take_statistics()
            self._merged = None

    def end_batch(self) -> None:
        self.take_statistics()
        self.accumulation.end_batch(self._loop.is_due)

    # From autograd into the slots.

    def _take(self, index: int, gradient: torch.Tensor, body: Body) -> None:
        """Write one parameter's gradient, weighted, into this replica's slot."""
        round = self._round_of(body)
        round.taken.add(index)
        if round.used is not None:
            return
        slot = round.slots(body.replica)[index]
        if gradient.layout == torch.sparse_coo:
            write_sparse(gradient, body.gradient_weight, slot, round.touched(body.replica, index))
        elif body.gradient_weight == 0:
            slot.zero_()  # left out, not multiplied by zero: it may be NaN
        elif gradient.dtype == slot.dtype:
            torch.mul(gradient, body.gradient_weight, out=slot)
        else:
            slot.copy_(gradient).mul_(body.gradient_weight)

    def _round_of(self, body: Body) -> Round:
        while len(self._rounds) <= body.backwards:
            self._rounds.append(self._make_round(f"backward {len(self._rounds)}"))
        round = self._rounds[body.backwards]
        name = f"of step {self._loop.batch}, backward {body.backwards + 1}, order {self._loop.order},"
        round.open(name, is_tried=self._loop.can_be_tried)
        return round

    def _make_round(self, name: str) -> Round:
        title = f"gradients {self.ordinal}, {name}"
        return Round(self._collective, self._parameters, self._statistics, self._sparse, title)

    # From the slots to everybody.

    def _deposit(self, round: Round, body: Body) -> None:
        assert round.exchange is not None
        round.write_rest(body.replica, body.weight if body.rows else 0.0)
        moved = self._statistics.moved()
        if body.replica == 0:
            self._values_of_moved = {n: self._statistics.still[n].tensor.clone() for n in moved}
        note = Note(
            body.counted if body.is_counted else body.gradient_weight,
            body.is_counted,
            body.is_nan,
            tell_story(self.last_calls, body.calls, self._rates()),
            round.used_here(),
            self._statistics.digest_others(),
            tuple(moved),
            self._digest_at_start,
            body.loss,
        )
        round.exchange.deposit(body.replica, self._with_numbers(note, body.replica))
        for replica in body.replicas[1:]:
            round.fill_with_zeros(replica)
            round.exchange.deposit(replica, self._with_numbers(note.without_weight(), replica))

    def _with_numbers(self, note: Note, replica: int) -> bytes:
        return replace(note, numbers=self._contributions.pack(replica, note.room)).pack()

    def _commit(self, round: Round, body: Body) -> None:
        exchange = round.exchange
        assert exchange is not None
        is_own_part_done = not exchange.missing
        self._loop.is_complete = is_own_part_done and exchange.commit()
        if not self._loop.is_complete:
            if is_own_part_done and (self._loop.runs_whole_shares or body.has_called_step):
                raise self._cannot_redo()
            self._show_own(round)
            return
        notes = Notes(exchange.notes, len(self._parameters), self._loop.step)
        notes.tell(self._tell, self._names, [place.name for place in self._statistics.others])
        self._contributions.take(notes.numbers, self._weigh_losses(notes.losses, body.total_rows))
        round.take_results(notes.divisor)
        round.used, count = notes.used, notes.divisor or float(body.total_rows)
        self._accumulate(round, None if body.is_added else count, is_first_round=body.backwards == 1)
        self._show_sum(round, round.used)
        self._merged = round
        self._agree_on_moved(notes.moved)

    def _weigh_losses(self, losses: Sequence[float], total_rows: int) -> list[Any]:
        shares = [share(total_rows, len(losses), replica) for replica in range(len(losses))]
        return [weighed(loss, len(rows)) for loss, rows in zip(losses, shares, strict=True)]

    def _accumulate(self, round: Round, count: float | None, is_first_round: bool) -> None:
        if self.accumulation.num_batches == 1:
            return
        assert round.used is not None
        given = self._parameters, round.views[: len(self._parameters)], round.used, count, is_first_round
        if self._loop.is_due:
            round.used = self.accumulation.finish(*given)
        else:
            self.accumulation.add(*given)

    def _cannot_redo(self) -> WorkerLost:
        return WorkerLost(
            f"A worker was lost at step {self._loop.step}, and this step cannot be done again.",
            why="a loop that steps more than once per batch, or sync_batchnorm, exchanges in the middle of a step.",
            do="start again from the last checkpoint (strategy.checkpoint writes them, and goes on from the newest).",
        )

    def _agree_on_moved(self, moved: Sequence[int]) -> None:
        """Buffers that stood still until now, and were changed by some body: replica 0's value, and they travel on."""
        for position in moved:
            place = self._statistics.still[position]
            value = self._values_of_moved.get(position, place.tensor)  # should replica 0's be lost, that of the heir
            received = FirstWorker(self._collective).give(as_bytes(value).cpu().numpy(), f"of {place.name}")
            place.put_bytes(torch.as_tensor(received).view(-1))
            self.moving.add((id(place.module), place.name))

    # What p.grad shows.

    def _show_own(self, round: Round) -> None:
        """The batch is not complete: p.grad shows this replica's own gradient."""
        for index in round.taken:
            parameter, base = self._parameters[index], self._bases[index]
            if base is not None and parameter.grad is not None:
                parameter.grad = base + parameter.grad

    def _show_sum(self, round: Round, used: np.ndarray) -> None:
        self._not_exchanged.clear()
        for index, parameter in enumerate(self._parameters):
            if not used[index]:
                continue
            base, view = self._bases[index], round.views[index]
            total = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
            if index in round.touched_at:
                total = as_sparse(total, round.views[round.touched_at[index]])
            parameter.grad = total if base is None else base.add_(total)

    def holds_any(self, optimizer: Any) -> bool:
        """Whether an optimizer holds one of the parameters of prepared models."""
        return any(id(parameter) in self._index for group in optimizer.param_groups for parameter in group["params"])

    def check_before_step(self, optimizer: Any) -> None:
        """A gradient that took part in no exchange would make the replicas drift apart in silence."""
        self.take_statistics()
        exchanged = [round.used for round in self._rounds if round.used is not None]
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                index = self._index.get(id(parameter))
                if index is None or not (
                    any(used[index] for used in exchanged) or parameter.grad is self._grads_at_start[index]
                ):
                    name = "" if index is None else f" ({self._names[index]})"
                    raise _not_exchanged(f"parameter {position} of group {number}{name}", parameter)

    def exchange_outside(self, optimizer: Any) -> None:
        """Before a step outside of prepared loops: gradients that no body has exchanged become means over workers."""
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is not None and id(parameter) not in self._index:
                    raise _not_exchanged(f"parameter {position} of group {number}", parameter)
        if not self._not_exchanged:
            return
        if self._collective.joining is not None:
            self._collective.joining.refuse("it trains on batches of its own, outside of prepared loaders")
        if self._outside is None:
            round = self._make_round("outside")
            self._outside = Outside(self._collective, self._loop, round, self._parameters)
        notes = self._outside.exchange(self._rates())
        if notes is None:
            raise self._cannot_redo()
        self._bases = [None] * len(self._parameters)
        self._show_sum(self._outside.round, notes.used)
        self._outside.round.take_statistics()
        self._collective.end_step()
        self._loop.batch += 1
        self._loop.step += 1


def _as_number(root: torch.Tensor) -> float:
    return float(root.detach()) if root.numel() == 1 and not root.is_complex() else 0.0


def _not_exchanged(which: str, parameter: torch.Tensor) -> MismatchError:
    return MismatchError(
        f"The optimizer has a gradient that was exchanged with nobody: {which}, shape {tuple(parameter.shape)}.",
        why="it belongs to no prepared model, was frozen at the start of this batch, or was set by hand.",
        do="pass its model to strategy.prepare, and change layers between batches.",
    )
