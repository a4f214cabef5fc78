"""PyTorch behind a strategy: takes models, optimizers, loaders, schedulers and scalers, and ties them to the run."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from duoka.collectives.arrays import as_array
from duoka.collectives.collective import Collective
from duoka.data.shares import share
from duoka.devices.device import Device
from duoka.errors import DuokaError, MismatchError
from duoka.frameworks.torch.accumulation import Accumulation
from duoka.frameworks.torch.backward import listen_to_backward
from duoka.frameworks.torch.contributions import Contributions, Pending, mean_of, tree_sum, weighed
from duoka.frameworks.torch.determinism import use_deterministic_kernels
from duoka.frameworks.torch.devices import native
from duoka.frameworks.torch.evaluation import Evaluation
from duoka.frameworks.torch.gradients import Gradients
from duoka.frameworks.torch.loader import PreparedLoader
from duoka.frameworks.torch.loop import Body, Loop
from duoka.frameworks.torch.note import compare_stories, tell_story
from duoka.frameworks.torch.optimizer import hold_back, learning_rates, prepare_optimizer
from duoka.frameworks.torch.shapes import fix_shapes
from duoka.frameworks.torch.sparse import sparse_parameters
from duoka.frameworks.torch.start import agree_on_start, check_devices
from duoka.frameworks.torch.statistics import Statistics, is_batch_norm
from duoka.frameworks.torch.sync_batchnorm import sync_batch_norm
from duoka.frameworks.torch.tensors import Tensors
from duoka.frameworks.torch.transport import carry_tensors
from duoka.strategies.strategy import Options


class TorchAdapter:
    def __init__(self, collective: Collective, seed: int, device: torch.device, options: Options | None = None) -> None:
        self._collective = collective
        self.device = device
        self.options = options or Options()
        self.loop = Loop(seed, collective.num_replicas)
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self.evaluation = Evaluation(collective, self.loop, device, self._models, self.tell_once)
        self.tensors = Tensors(device)
        self._num_schedulers = self._num_scalers = 0
        self._prepared: dict[int, Any] = {}
        self._told: set[str] = set()
        self._signature: tuple[Any, ...] = ()
        self._saved_statistics: list[torch.Tensor] = []
        self._statistics = Statistics([])
        self._calls: tuple[int, list[str]] | None = None  # of the first body of this batch
        self._contributions = Contributions()
        self._left: DuokaError | None = None
        self.gradients = Gradients(collective, self.loop, self.tell_once, lambda: learning_rates(self._optimizers))
        if self.loop.is_managed:
            self._start_managing()

    def _start_managing(self) -> None:
        self.loop.is_managed = True
        listen_to_backward(self.gradients)
        if self.options.sync_batchnorm and not self.loop.runs_whole_shares:
            self.loop.runs_whole_shares = True
            sync_batch_norm(self.loop, self._collective)
            if self._collective.num_replicas > len(self._collective.workers):
                self.tell_once(
                    "sync_batchnorm: each worker runs its rows as one batch."
                    " The numbers are those of one device; equal bits need an equal number of workers"
                )

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Prepare what is given and return it in the same order. Models come first, whatever their place."""
        for thing in objects:
            if id(thing) in self._prepared:
                raise MismatchError(
                    f"This {type(thing).__name__} has been prepared already.",
                    do="call strategy.prepare once for each object.",
                )
        ordered = sorted(objects, key=lambda thing: not isinstance(thing, nn.Module))
        results = {id(thing): self._prepare_one(thing) for thing in ordered}
        self._prepared.update({id(thing): thing for thing in (*objects, *results.values())})
        self._rescan()
        return [results[id(thing)] for thing in objects]

    def _prepare_one(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return self._prepare_model(thing)
        if isinstance(thing, torch.optim.Optimizer):
            return self._prepare_optimizer(thing)
        if isinstance(thing, DataLoader):
            return PreparedLoader(thing, self._collective, self.loop, self.device, self)
        if isinstance(thing, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)):
            self._num_schedulers += 1
            hold_back(thing, ("step",), self.loop, f"scheduler {self._num_schedulers}")
            return thing
        if isinstance(thing, torch.amp.GradScaler):
            self._num_scalers += 1
            hold_back(thing, ("unscale_", "step", "update"), self.loop, f"scaler {self._num_scalers}")
            return thing
        raise MismatchError(
            f"A {type(thing).__name__} cannot be prepared.",
            do="prepare models, optimizers, DataLoaders, LR schedulers and GradScalers; leave the rest as it is.",
        )

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        check_devices(model, self.device)
        model.to(self.device)
        self._models.append(model)
        agree_on_start(model, self._collective)
        return model

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        known = {id(p) for model in self._models for p in model.parameters()}
        strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if strangers:
            raise MismatchError(
                f"The optimizer holds {len(strangers)} parameters of no prepared model (shape"
                f" {tuple(strangers[0].shape)} first).",
                why="their gradients would never be exchanged.",
                do="prepare the model whose parameters the optimizer was made with, in the same call or before.",
            )
        self._optimizers.append(optimizer)
        prepare_optimizer(optimizer, self.loop, f"optimizer {len(self._optimizers)}", self._check_before_step)
        return optimizer

    def _check_before_step(self, optimizer: Any) -> None:
        if self.loop.body is None:
            self._rescan()
            self.gradients.exchange_outside(optimizer)
        else:
            self.gradients.check_before_step(optimizer)

    # What the strategy asks.

    @property
    def step(self) -> int:
        return self.loop.step

    @property
    def batch(self) -> int:
        return self.loop.batch

    @property
    def position(self) -> tuple[int, int] | None:
        return None if self.loop.body is None else (self.loop.batch, self.loop.body.total_rows)

    @property
    def stepped(self) -> bool:
        body = self.loop.body
        if body is not None:
            body.has_asked = True  # what it does now may depend on the answer
        return body is None or self.loop.may_step

    @property
    def count(self) -> int | None:
        return None if self.loop.body is None else self.loop.body.rows

    def accumulate(self, num_batches: int) -> None:
        if self.loop.body is not None or self.gradients.accumulation.batches_before:
            raise MismatchError(
                "accumulate was called in the middle of a batch, or of an accumulation.",
                do="call strategy.accumulate(k) before the loop.",
            )
        self.gradients.accumulation = Accumulation(num_batches)
        if num_batches > 1 and not self.loop.is_managed:
            self._start_managing()
            self._rescan()

    def weigh(self, loss: torch.Tensor, count: Any) -> torch.Tensor:
        """The loss is a mean over `count` things (tokens), or, with None, a sum: gradients are weighted accordingly."""
        body = self.loop.body
        if body is None or not self.loop.is_managed:
            return loss
        if count is None:
            # A sum over rows: undo the share, so that the replicas' gradients simply add up.
            return loss / body.weight if body.rows else loss
        body.count = float(count)
        if not 0 <= body.count < math.inf:
            raise MismatchError(f"A count of {count} was given with strategy.weigh.", do="give how many things it is.")
        if not self.options.sync_batchnorm:
            return loss
        # A worker that counts nothing still takes part in everybody's statistics: its gradient must not be left out.
        if body.count == 0 and bool(loss.detach().isnan()):
            raise MismatchError(
                "A loss over nothing is NaN, and sync_batchnorm needs its gradient.",
                do="divide a sum by max(count, 1), so that a loss over nothing is zero.",
            )
        body.is_sum = True
        return loss * body.count

    def contribute(self, kind: str, value: Any, count: Any) -> Pending | None:
        """Inside a body: hand in this replica's number. None outside of bodies."""
        body = self.loop.body
        if body is None:
            return None
        body.record(kind)
        if kind == "gather":
            return self._contributions.add(body.replica, as_array(value) if body.rows else None, _without_none)
        if kind == "sum":
            given = as_array(value).astype(np.float64) if body.rows else None
            return self._contributions.add(body.replica, given, tree_sum)
        rows = body.rows if count is None else float(count)
        return self._contributions.add(body.replica, weighed(value, rows if body.rows else 0), mean_of)

    def evaluate(self, function: Any, loader: Any) -> Any:
        """sum / count of the pairs that the function returns, over the batches of all replicas."""
        return self.evaluation.evaluate(function, loader)

    # What the loader tells.

    def is_evaluating(self) -> bool:
        return not torch.is_grad_enabled() or (bool(self._models) and not any(m.training for m in self._models))

    def begin_loop(self) -> None:
        self.evaluation.forget_open_loops()
        if self._left is not None:
            raise self._left

    def begin_batch(self, num_rows: int, is_last: bool) -> None:
        self._rescan()
        self._calls = None
        if self.loop.is_managed:
            fix_shapes()
            self._check_single_rows(num_rows)
            self.loop.is_due = self.gradients.accumulation.is_due(is_last)
            self.gradients.begin_batch()
            self._saved_statistics = self._statistics.save()

    def _rescan(self) -> None:
        """Layers may have been frozen, unfrozen or added since the last batch."""
        if not self.loop.is_managed:
            return
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for model in self._models:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    named.setdefault(id(parameter), (name, parameter))
        statistics = Statistics(self._models, self.gradients.moving, is_synced=self.options.sync_batchnorm)
        signature = (tuple(named), statistics.signature)
        if signature != self._signature:
            self._signature = signature
            self._statistics = statistics
            self.gradients.watch(list(named.values()), sparse_parameters(self._models), statistics)

    def _check_single_rows(self, num_rows: int) -> None:
        if self.options.sync_batchnorm or self._collective.num_replicas == 1:
            return
        shares = {len(share(num_rows, self._collective.num_replicas, r)) for r in range(self._collective.num_replicas)}
        if 1 in shares and any(self._uses_batch_norm(model) for model in self._models):
            raise MismatchError(
                f"At step {self.loop.step} a replica has a single row, and the model has BatchNorm in training mode.",
                why=f"{num_rows} rows are split between {self._collective.num_replicas} replicas, and the variance of"
                " one row is not defined.",
                do="use drop_last=True in the DataLoader, fewer replicas, or sync_batchnorm=True.",
            )

    @staticmethod
    def _uses_batch_norm(model: nn.Module) -> bool:
        return any(is_batch_norm(module) and module.training for module in model.modules())

    def begin_body(self, is_first: bool) -> None:
        if not self.loop.is_managed:
            return
        if not is_first:
            self.gradients.begin_later_body()
            self._statistics.restore(self._saved_statistics)
        self._statistics.watch_still()

    def end_body(self, body: Body) -> None:
        if not self.loop.is_managed or body.is_discarded:
            return
        if self._calls is None:
            self._calls = body.replica, body.calls
        elif self._calls[1] != body.calls:
            other, calls = self._calls
            raise MismatchError(
                f"At step {self.loop.step} the loop bodies of replicas {other} and {body.replica} did not do the same.",
                why=f"replica {other}: {', '.join(calls) or 'nothing'}\n"
                f"replica {body.replica}: {', '.join(body.calls) or 'nothing'}",
                do="let every body call the same things: count with strategy.enumerate or strategy.step, guard what"
                " runs once per batch with `if strategy.stepped:`, leave a batch out on all replicas or on none.",
            )

    def end_batch(self) -> None:
        self._contributions.settle(self._collective)
        if self.loop.is_managed:
            self.gradients.last_calls = [] if self._calls is None else self._calls[1]
            self.gradients.end_batch()
        self._collective.end_step()
        self.loop.batch += 1
        self.loop.step += self.loop.is_due

    def leave_batch(self, body: Body) -> None:
        """The user's loop was left by `break`, `return` or an error. A complete batch counts, another one does not."""
        try:
            if self.loop.is_complete or not self.loop.is_managed:
                self.end_body(body)
                self.end_batch()
            elif self._calls is not None or body.backwards:
                self._left = MismatchError(
                    f"At step {self.loop.step} the loop was left in the middle of a batch.",
                    why=f"replica {body.replica} had run, others of this worker had not; the batch was not counted.",
                    do="leave the loop on strategy.step or strategy.enumerate, which count whole batches.",
                )
                self.tell_once(str(self._left))
        except DuokaError as error:  # nothing can be raised from here: it is the next loop that hears of it
            self._left = error

    def end_loop(self) -> None:
        """The loader is at its end. What the last bodies called is compared here: no gradient follows to carry it."""
        if not self.loop.is_managed or len(self._collective.workers) == 1:
            return
        story = tell_story(self.gradients.last_calls, [], learning_rates(self._optimizers))
        exchange = self._collective.exchange([], f"at the end of a loop, after {self.loop.batch} batches")
        is_committed = False
        while not is_committed:
            for replica in exchange.missing:
                exchange.deposit(replica, story.encode())
            is_committed = exchange.commit()
        compare_stories([note.decode() for note in exchange.notes], self.loop.step)

    def tell_once(self, text: str, key: str = "") -> None:
        if (key or text) not in self._told:
            self._told.add(key or text)
            if self._collective.worker == min(self._collective.workers):
                print(f"duoka: {text}", file=sys.stderr)


def _without_none(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def make_adapter(collective: Collective, seed: int, device: Device, options: Options) -> TorchAdapter:
    place = native(device, is_only_card=options.sees_only_its_card)
    if options.exact:
        use_deterministic_kernels()
    return TorchAdapter(carry_tensors(collective, place, options), seed, place, options)
