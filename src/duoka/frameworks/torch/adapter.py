"""PyTorch behind a strategy: takes models, optimizers, loaders, schedulers and scalers, and ties them to the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from duoka.collectives.arrays import as_array
from duoka.collectives.collective import Collective
from duoka.devices.device import Device
from duoka.errors import MismatchError
from duoka.frameworks.torch.backward import listen_to_backward
from duoka.frameworks.torch.contributions import Contributions, Pending, mean_of, tree_sum, weighed
from duoka.frameworks.torch.gradients import Gradients
from duoka.frameworks.torch.loader import PreparedLoader
from duoka.frameworks.torch.loop import Body, Loop
from duoka.frameworks.torch.optimizer import hold_back, prepare_optimizer
from duoka.frameworks.torch.start import agree_on_start
from duoka.frameworks.torch.statistics import Statistics, is_batch_norm


class TorchAdapter:
    def __init__(self, collective: Collective, seed: int, device: torch.device) -> None:
        self._collective = collective
        self.device = device
        self.loop = Loop(seed, collective.num_replicas)
        self.gradients = Gradients(collective, self.loop, self.tell_once)
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._prepared: dict[int, Any] = {}
        self._told: set[str] = set()
        self._signature: tuple[Any, ...] = ()
        self._saved_statistics: list[torch.Tensor] = []
        self._statistics = Statistics([])
        self._backwards_of_step: int | None = None
        self._contributions = Contributions()
        if collective.num_replicas > 1:
            listen_to_backward(self.gradients)

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
        return [results[id(thing)] for thing in objects]

    def _prepare_one(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return self._prepare_model(thing)
        if isinstance(thing, torch.optim.Optimizer):
            self._check_optimizer(thing)
            self._optimizers.append(thing)
            prepare_optimizer(thing, self.loop, self.gradients if self._collective.num_replicas > 1 else None)
            return thing
        if isinstance(thing, DataLoader):
            return PreparedLoader(thing, self._collective, self.loop, self.device, self)
        if isinstance(thing, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)):
            hold_back(thing, ("step",), self.loop)
            return thing
        if isinstance(thing, torch.amp.GradScaler):
            hold_back(thing, ("unscale_", "step", "update"), self.loop)
            return thing
        raise MismatchError(
            f"A {type(thing).__name__} cannot be prepared.",
            do="prepare models, optimizers, DataLoaders, LR schedulers and GradScalers; leave the rest as it is.",
        )

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        model.to(self.device)
        self._models.append(model)
        agree_on_start(model, self._collective)
        return model

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        known = {id(p) for model in self._models for p in model.parameters()}
        strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if strangers and self._models:
            raise MismatchError(
                f"The optimizer holds {len(strangers)} parameters of no prepared model (shape"
                f" {tuple(strangers[0].shape)} first).",
                why="their gradients would never be exchanged.",
                do="prepare the model whose parameters the optimizer was made with, in the same call or before.",
            )

    # What the strategy asks.

    @property
    def step(self) -> int:
        return self.loop.step

    @property
    def stepped(self) -> bool:
        return self.loop.body is None or self.loop.may_step

    @property
    def count(self) -> int | None:
        return None if self.loop.body is None else self.loop.body.rows

    def weigh(self, loss: torch.Tensor, count: Any) -> torch.Tensor:
        """The loss is a mean over `count` things (tokens), or, with None, a sum: gradients are weighted accordingly."""
        body = self.loop.body
        if body is None or self._collective.num_replicas == 1:
            return loss
        if count is None:
            # A sum over rows: undo the share, so that the replicas' gradients simply add up.
            return loss / body.weight if body.rows else loss
        body.count = float(count)
        return loss

    def contribute(self, kind: str, value: Any, count: Any) -> Pending | None:
        """Inside a body: hand in this replica's number. None outside of bodies."""
        body = self.loop.body
        if body is None:
            return None
        if kind == "gather":
            return self._contributions.add(body.replica, as_array(value) if body.rows else None, _without_none)
        if kind == "sum":
            given = as_array(value).astype(np.float64) if body.rows else None
            return self._contributions.add(body.replica, given, tree_sum)
        rows = body.rows if count is None else float(count)
        return self._contributions.add(body.replica, weighed(value, rows if body.rows else 0), mean_of)

    # What the loader tells.

    def is_evaluating(self) -> bool:
        return not torch.is_grad_enabled() or (bool(self._models) and not any(m.training for m in self._models))

    def begin_batch(self) -> None:
        self._rescan()
        self._backwards_of_step = None
        if self._collective.num_replicas > 1:
            self.gradients.begin_batch()
            self._saved_statistics = self._statistics.save() if len(self._collective.replicas) > 1 else []

    def _rescan(self) -> None:
        """Layers may have been frozen, unfrozen or added since the last batch."""
        if self._collective.num_replicas == 1:
            return
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for model in self._models:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    named.setdefault(id(parameter), (name, parameter))
        statistics = Statistics(self._models)
        signature = (tuple(named), statistics.signature)
        if signature != self._signature:
            self._signature = signature
            self._statistics = statistics
            self.gradients.watch(list(named.values()), statistics)

    def check_rows(self, rows: int) -> None:
        if rows == 1 and self._collective.num_replicas > 1 and any(self._uses_batch_norm(m) for m in self._models):
            raise MismatchError(
                f"At step {self.loop.step} a replica has a single row, and the model has BatchNorm in training mode.",
                why="the variance of one row is not defined.",
                do="use drop_last=True in the DataLoader, fewer replicas, or sync_batchnorm=True.",
            )

    @staticmethod
    def _uses_batch_norm(model: nn.Module) -> bool:
        return any(is_batch_norm(module) and module.training for module in model.modules())

    def begin_body(self, is_first: bool) -> None:
        if self._collective.num_replicas > 1 and not is_first:
            self.gradients.begin_later_body()
            if not self._saved_statistics:  # a replica inherited in the middle of the step
                return
            self._statistics.restore(self._saved_statistics)

    def end_body(self, body: Body) -> None:
        if self._backwards_of_step not in (None, body.backwards):
            raise MismatchError(
                f"At step {self.loop.step} the body of replica {body.replica} called backward {body.backwards} times,"
                f" another one {self._backwards_of_step} times.",
                do="let every body do the same; a batch to be left out is left out by all replicas.",
            )
        self._backwards_of_step = body.backwards

    def end_batch(self) -> None:
        self._contributions.settle(self._collective)
        self._collective.end_step()
        self.loop.step += 1

    def tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            if self._collective.worker == min(self._collective.workers):
                print(f"duoka: {text}", file=sys.stderr)


def _without_none(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def make_adapter(collective: Collective, seed: int, device: Device) -> TorchAdapter:
    # A worker sees its own card only, so a card is always the first one here.
    return TorchAdapter(collective, seed, torch.device("cuda:0" if device.kind == "gpu" else "cpu"))
