"""The course of a loop: what happens when a batch begins, a body ends, the loop is left. Loaders tell of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from duoka.collectives.collective import Collective
from duoka.collectives.joining import unrecorded
from duoka.errors import CheckpointError, DuokaError, MismatchError, Stopped
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.torch.contributions import Contributions
from duoka.frameworks.torch.evaluation import Evaluation
from duoka.frameworks.torch.gradients import Gradients
from duoka.frameworks.torch.loader import PreparedLoader
from duoka.frameworks.torch.loop import Body, Loop
from duoka.frameworks.torch.newcomers import Newcomers
from duoka.frameworks.torch.note import compare_stories
from duoka.frameworks.torch.shapes import fix_shapes
from duoka.frameworks.torch.single_samples import SingleSamples
from duoka.frameworks.torch.source import Unit, rows_of
from duoka.frameworks.torch.sparse import sparse_parameters
from duoka.frameworks.torch.state import TorchState
from duoka.frameworks.torch.statistics import Statistics


def refusal(why: str, do: str = "") -> CheckpointError:
    return CheckpointError(
        "strategy.checkpoint cannot save this loop.",
        why=f"{why}: where it is in its data is not known.",
        do=do
        or "write `for batch in loader:`; where an iterator is kept in a variable and its loop is left by break, `del`"
        " the variable behind the loop.",
    )


class Course:
    def __init__(
        self,
        collective: Collective,
        loop: Loop,
        gradients: Gradients,
        contributions: Contributions,
        evaluation: Evaluation,
        models: list[nn.Module],
        optimizers: list[Any],
        checks: Checks,
        tell_once: Callable[[str], None],
        *,
        is_synced: bool,
        at_draw: Callable[[], None],
        at_start: Callable[[], None],
        at_end: Callable[[], None],
        at_border: Callable[[Callable[[], None]], None],
        is_saved: Callable[[], bool],
        newcomers: Newcomers,
    ) -> None:
        self._collective = collective
        self._loop = loop
        self._gradients = gradients
        self._contributions = contributions
        self.evaluation = evaluation
        self._models, self._optimizers, self._checks = models, optimizers, checks
        self.tell_once = tell_once
        self._is_synced = is_synced
        self.choose_plain = at_draw
        self._at_start, self._at_end, self._at_border, self._is_saved = at_start, at_end, at_border, is_saved
        self._newcomers, self.begin_pass = newcomers, newcomers.begin_pass
        self._signature: tuple[Any, ...] = ()
        self._statistics = Statistics([])
        self._calls: tuple[int, list[str]] | None = None  # of the first body of this batch
        self._placement = collective.placement  # when this batch began
        self._left: DuokaError | None = None
        self._num_rows = 0  # of this batch
        self._single_samples = SingleSamples(models, collective.num_replicas, tell_once)
        self._looked_ahead: set[int] = set()  # sizes of last batches
        self._end_watch: Callable[[], None] = lambda: None

    def is_evaluating(self) -> bool:
        return not torch.is_grad_enabled() or (bool(self._models) and not any(m.training for m in self._models))

    def begin_loop(self) -> None:
        self.evaluation.forget_open_loops()
        if self._left is not None:
            raise self._left
        if self._loop.body is None:
            self._at_start()

    def end_pass(self, loader: PreparedLoader) -> None:
        if self._loop.body is None and loader.passes.has_led:
            self._at_end()
        self._newcomers.end_pass(loader)

    @property
    def is_saved(self) -> bool:
        return self._is_saved()

    def lose(self, why: str, do: str = "") -> None:
        if self.is_saved:
            raise refusal(why, do)

    def begin_step(self) -> None:
        self._loop.arrive()
        self._at_border(self._compare)

    def _compare(self) -> None:
        is_looked_at = self._loop.is_managed or self._collective.rehearsal is not None
        if is_looked_at and not self._gradients.accumulation.batches_before:
            self._checks.at_border(self._loop.step, lambda: TorchState(self._models, self._optimizers))

    def begin_batch(self, num_rows: int, is_last: bool) -> None:
        if self._loop.body is not None and self._is_saved():
            self.tell_once(
                "with one replica, loaders that are walked side by side or within one another do not go on from a"
                " checkpoint with the bits of a run that never stopped: use one loader, or replicas=2"
            )
        self.rescan()
        self._calls, self._placement = None, self._collective.placement
        if self._loop.is_managed:
            fix_shapes()
            self._num_rows = num_rows
            self._loop.is_due = self._gradients.accumulation.is_due(is_last)
            self._gradients.begin_batch()

    def rescan(self) -> None:
        """Layers may have been frozen, unfrozen or added since the last batch."""
        if not self._loop.is_managed:
            return
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for model in self._models:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    named.setdefault(id(parameter), (name, parameter))
        statistics = Statistics(self._models, self._gradients.moving, is_synced=self._is_synced)
        signature = (tuple(named), statistics.signature)
        if signature != self._signature:
            self._signature = signature
            self._statistics = statistics
            self._gradients.watch(list(named.values()), sparse_parameters(self._models), statistics)

    def begin_body(self, unit: Unit, is_first: bool) -> None:
        if not self._loop.is_managed:
            return
        self._contributions.forget_replicas(unit)
        self._watch_single_samples(unit)
        if not is_first:
            self._gradients.begin_later_body()
            self._statistics.begin_later_body()
        self._statistics.watch_still()

    def _watch_single_samples(self, unit: Unit) -> None:
        self._end_watch()
        if not self._is_synced:
            rows, _ = rows_of(self._num_rows, self._collective.num_replicas, unit)
            last = 0 if len(unit) > 1 or self._loop.last_rows in self._looked_ahead else self._loop.last_rows
            self._looked_ahead.add(last)
            self._end_watch = self._single_samples.watch(unit[0], len(rows), self._num_rows, last)

    def end_body(self, body: Body) -> None:
        self._end_watch()
        if body.is_discarded:
            self._contributions.forget()
        if not self._loop.is_managed or body.is_discarded:
            return
        if self._loop.is_complete and self._loop.is_due and body.held_back:
            raise MismatchError(
                f"At step {self._loop.step}, {', '.join(sorted(body.held_back))} was called before backward.",
                why="before backward nobody knows yet whether the batch is complete, so it did nothing.",
                do="call it after backward.",
            )
        if self._calls is None:
            self._calls = body.replica, body.calls
        elif self._calls[1] != body.calls:
            other, calls = self._calls
            raise MismatchError(
                f"At step {self._loop.step} the bodies of replicas {other} and {body.replica} did not do the same.",
                why=f"replica {other}: {', '.join(calls) or 'nothing'}\n"
                f"replica {body.replica}: {', '.join(body.calls) or 'nothing'}",
                do="let every body call the same things: count with strategy.enumerate or strategy.step, guard what"
                " runs once per batch with `if strategy.stepped:`, leave a batch out on all replicas or on none.",
            )

    def end_batch(self) -> None:
        self._contributions.settle(self._collective, self._loop.step)
        if self._loop.is_managed:
            self._gradients.last_calls = [] if self._calls is None else self._calls[1]
            self._gradients.end_batch()
        self._collective.end_step()
        self._loop.batch += 1
        self._loop.step += self._loop.is_due

    def leave_batch(self, body: Body) -> None:
        """The user's loop was left by `break`, `return` or an error. A complete batch counts, another one does not."""
        self._end_watch()
        try:
            if self._loop.is_complete or not self._loop.is_managed:
                self.end_body(body)
                self.end_batch()
            elif self._loop.is_interrupted:
                pass  # by an error, which says why
            elif self._calls is not None or body.backwards:
                self._left = MismatchError(
                    f"At step {self._loop.step} the loop was left in the middle of a batch.",
                    why=f"replica {body.replica} had run, others of this worker had not; the batch was not counted.",
                    do="leave the loop on strategy.step or strategy.enumerate, which count whole batches.",
                )
                self._tell_of_leaving(str(self._left))
            elif len(self._collective.replicas) > 1:
                self._tell_of_leaving(
                    f"a loop was left after {self._loop.batch} global batches in all; a counter of loop bodies counts"
                    f" each of them {len(self._collective.replicas)} times here, strategy.enumerate once"
                )
        except DuokaError as error:  # nothing can be raised from here: it is the next loop that hears of it
            self._left = error
        except Stopped:  # the run ends, and whoever has left this loop did so for it
            pass

    def _tell_of_leaving(self, text: str) -> None:
        """Not after a loss in this batch: most likely it has raised, in a call of the user's, and nobody left."""
        if self._collective.placement is self._placement:
            self.tell_once(text)

    def end_loop(self) -> None:
        """The loader is at its end. What the last bodies called is compared here: no gradient follows to carry it."""
        if not self._loop.is_managed or len(self._collective.workers) == 1:
            return
        story = self._gradients.last_story()
        with unrecorded(self._collective.joining):
            exchange = self._collective.exchange([], f"at the end of a loop, after {self._loop.batch} batches")
            exchange.common_part = bytes
            exchange.carry_out(lambda replica: story.encode())
        compare_stories([note.decode() for note in exchange.notes], self._loop.step)
