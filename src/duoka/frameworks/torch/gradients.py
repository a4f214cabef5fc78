"""Gradients on their way from the replicas' backwards to the mean that everybody sees in `p.grad`.

Each backward of a body is a *round* with buffers of its own. A hook on every parameter writes the weighted
gradient into this replica's slot the moment autograd has it. When the outermost backward ends and all replicas of
this worker have deposited theirs, the round is committed, and `p.grad` shows the sum over all replicas.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from duoka.collectives.collective import Buffer, Collective, Exchange
from duoka.errors import MismatchError
from duoka.frameworks.torch.layout import Layout, numpy_dtype
from duoka.frameworks.torch.loop import Body, Loop
from duoka.frameworks.torch.statistics import Statistics

_NOTE = struct.Struct("<d?")  # the count that the gradient was weighted with; whether the user gave it


class Round:
    """The n-th backward of the bodies of a step: its buffers, and what has come in."""

    def __init__(self, collective: Collective, parameters: Sequence[torch.Tensor], statistics: Statistics) -> None:
        self.statistics = statistics
        self._layout = Layout.of([*parameters, *statistics.merged])
        self.buffers: list[Buffer] = [
            collective.buffer(size, numpy_dtype(dtype))
            for size, dtype in zip(self._layout.sizes, self._layout.dtypes, strict=True)
        ]
        if statistics.others:
            self.buffers.append(collective.buffer(statistics.other_bytes, np.uint8))
        # What p.grad shows is this worker's own, allocated once.
        self.private = [
            torch.zeros(size, dtype=d) for size, d in zip(self._layout.sizes, self._layout.dtypes, strict=True)
        ]
        self.private_views = self._layout.views(self.private)
        self.exchange: Exchange | None = None
        self.used: np.ndarray | None = None  # which parameters got a gradient; known once it is committed
        self.taken: set[int] = set()
        self.bases: dict[int, torch.Tensor | None] = {}
        self._slots: dict[int, list[torch.Tensor]] = {}

    def slots(self, replica: int) -> list[torch.Tensor]:
        """A view for each parameter and each merged statistic into this replica's slots."""
        if replica not in self._slots:
            assert self.exchange is not None
            flats = [
                torch.from_numpy(self.exchange.slot(self.buffers[group], replica))
                for group in range(len(self._layout.dtypes))
            ]
            self._slots[replica] = self._layout.views(flats)
        return self._slots[replica]

    def copy_results(self, divisor: float | None) -> None:
        """Take the sums out of shared memory. Users may change what p.grad shows; nobody else sees it."""
        assert self.exchange is not None
        for buffer, private in zip(self.buffers, self.private, strict=False):
            result = self.exchange.result(buffer)
            if divisor is None:
                np.copyto(private.numpy(), result)
            else:
                np.divide(result, result.dtype.type(divisor), out=private.numpy())


class Gradients:
    def __init__(self, collective: Collective, loop: Loop, tell: Callable[[str], None]) -> None:
        self._collective = collective
        self._loop = loop
        self._tell = tell
        self._names: list[str] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._index: dict[int, int] = {}
        self._statistics = Statistics([])
        self._hooks: list[Any] = []
        self._rounds: list[Round] = []
        self._grads_at_start: list[torch.Tensor | None] = []
        self._depth = 0
        self._has_told_unused = False

    def watch(self, named: Sequence[tuple[str, torch.nn.Parameter]], statistics: Statistics) -> None:
        """From now on these are the parameters. Called again when layers were frozen, unfrozen or added."""
        for hook in self._hooks:
            hook.remove()
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._statistics = statistics
        self._rounds = []
        self._hooks = [p.register_hook(self._make_hook(index)) for index, p in enumerate(self._parameters)]

    def knows(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._index

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            body = self._loop.body
            if body is not None and self._depth:
                self._take(index, gradient, body)

        return hook

    def begin_batch(self) -> None:
        self._grads_at_start = [parameter.grad for parameter in self._parameters]
        for round in self._rounds:
            round.exchange = round.used = None

    def begin_later_body(self) -> None:
        """Another replica of the same batch starts from where the first one did."""
        for parameter, grad in zip(self._parameters, self._grads_at_start, strict=True):
            parameter.grad = grad

    def enter_backward(self) -> None:
        if self._depth == 0 and len(self._rounds) > 0:
            for round in self._rounds:
                round.taken.clear()
                round.bases.clear()
        self._depth += 1

    def leave_backward(self) -> None:
        self._depth -= 1
        body = self._loop.body
        if self._depth or body is None or body.backwards >= len(self._rounds):
            return
        round = self._rounds[body.backwards]
        if not round.taken:
            return
        body.backwards += 1
        if round.used is not None:
            # A later backward of this step met a loss, and its replicas run again: this one is done.
            self._show_sum(round, round.used)
        else:
            self._deposit(round, body)
            self._commit(round)

    def abandon_backward(self) -> None:
        """The backward raised: nothing of it counts."""
        self._depth -= 1

    def _take(self, index: int, gradient: torch.Tensor, body: Body) -> None:
        """Write one parameter's gradient, weighted, into this replica's slot."""
        round = self._round_of(body)
        if round.used is not None:
            self._set_aside(round, index)
            round.taken.add(index)
            return
        slot = round.slots(body.replica)[index]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if index in round.taken:
            slot.add_(gradient * body.gradient_weight)  # a re-entrant backward came here before
            return
        self._set_aside(round, index)
        round.taken.add(index)
        if body.gradient_weight == 0:
            slot.zero_()  # left out, not multiplied by zero: it may be NaN
        elif gradient.dtype == slot.dtype:
            torch.mul(gradient, body.gradient_weight, out=slot)
        else:
            slot.copy_(gradient).mul_(body.gradient_weight)

    def _set_aside(self, round: Round, index: int) -> None:
        """Keep what p.grad held. Autograd would add to it in place; so it hands over this backward's gradient alone."""
        parameter = self._parameters[index]
        base = parameter.grad
        if base is not None and base.data_ptr() == round.private_views[index].data_ptr():
            base = base.clone()  # it lies where the result of this round will be written
        round.bases[index] = base
        parameter.grad = None

    def _round_of(self, body: Body) -> Round:
        while len(self._rounds) <= body.backwards:
            statistics = Statistics([]) if self._rounds else self._statistics
            self._rounds.append(Round(self._collective, self._parameters, statistics))
        round = self._rounds[body.backwards]
        if round.exchange is None:
            name = f"of step {self._loop.step}, backward {body.backwards + 1}, order {self._loop.order},"
            round.exchange = self._collective.exchange(round.buffers, name)
        return round

    def _deposit(self, round: Round, body: Body) -> None:
        assert round.exchange is not None
        slots = round.slots(body.replica)
        num_parameters = len(self._parameters)
        for index in range(num_parameters):
            if index not in round.taken:
                slots[index].zero_()
        with torch.no_grad():
            for slot, buffer in zip(slots[num_parameters:], round.statistics.merged, strict=True):
                slot.copy_(buffer).mul_(body.weight) if body.rows else slot.zero_()
        if round.statistics.others:
            place = round.exchange.slot(round.buffers[-1], body.replica)
            round.statistics.write_others(place) if body.replica == 0 else place.fill(0)
        round.exchange.deposit(body.replica, self._write_note(round, body))

    def _write_note(self, round: Round, body: Body) -> bytes:
        used = np.zeros(len(self._parameters), bool)
        used[list(round.taken)] = True
        head = _NOTE.pack(body.gradient_weight, body.is_counted)
        return head + (b"" if used.all() else np.packbits(used).tobytes())

    def _commit(self, round: Round) -> None:
        assert round.exchange is not None
        self._loop.is_complete = not round.exchange.missing and round.exchange.commit()
        if not self._loop.is_complete:
            self._show_own(round)
            return
        round.used, divisor = self._read_notes(round.exchange.notes)
        round.copy_results(divisor)
        self._show_sum(round, round.used)
        self._take_statistics(round)

    def _read_notes(self, notes: Sequence[bytes]) -> tuple[np.ndarray, float | None]:
        """Which parameters got a gradient in any replica, and what to divide by when the user gave counts."""
        by_replica = np.stack([self._read_used(note[_NOTE.size :]) for note in notes])
        used = np.logical_or.reduce(by_replica)
        everywhere = np.logical_and.reduce(by_replica)
        if not everywhere.all() and not self._has_told_unused:
            self._has_told_unused = True
            names = [name for name, is_used in zip(self._names, everywhere, strict=True) if not is_used]
            more = f" and {len(names) - 5} more" if names[5:] else ""
            self._tell(f"no gradient from some replicas, counted as zero: {', '.join(names[:5])}{more}")
        heads = [_NOTE.unpack_from(note) for note in notes]
        if not any(is_counted for _, is_counted in heads):
            return used, None
        if not all(is_counted for _, is_counted in heads):
            raise MismatchError(
                f"At step {self._loop.step} some replicas gave a count with strategy.weigh and others did not.",
                do="call strategy.weigh in every loop body, also when the count is zero.",
            )
        return used, float(sum(weight for weight, _ in heads)) or 1.0

    def _read_used(self, bits: bytes) -> np.ndarray:
        count = len(self._parameters)
        if not bits:
            return np.ones(count, bool)
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(bool)

    def _show_own(self, round: Round) -> None:
        """The batch is not complete: p.grad shows this replica's own gradient."""
        for index in round.taken:
            parameter, base = self._parameters[index], round.bases[index]
            if base is not None and parameter.grad is not None:
                parameter.grad = base + parameter.grad

    def _show_sum(self, round: Round, used: np.ndarray) -> None:
        for index, parameter in enumerate(self._parameters):
            if not used[index]:
                continue
            base = round.bases[index] if index in round.taken else parameter.grad
            view = round.private_views[index]
            total = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
            parameter.grad = total if base is None else base.add_(total)

    def _take_statistics(self, round: Round) -> None:
        assert round.exchange is not None
        with torch.no_grad():
            merged = round.private_views[len(self._parameters) :]
            for buffer, view in zip(round.statistics.merged, merged, strict=True):
                buffer.copy_(view)
        if round.statistics.others:
            round.statistics.read_others(round.exchange.result(round.buffers[-1]))
