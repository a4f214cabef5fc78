"""Keras on PyTorch: the step runs as it is, replica after replica, and the optimizer once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch

from duoka.collectives.arrays import Array, as_array
from duoka.data.seeds import derive
from duoka.errors import MismatchError
from duoka.frameworks.exchange.outcome import Outcome, Total
from duoka.frameworks.keras.backend import Backend
from duoka.frameworks.keras.data import cut
from duoka.frameworks.keras.host_torch import copy_of, tensor_of
from duoka.frameworks.keras.logs import Logs, metric_results
from duoka.frameworks.keras.recorder import Recorder
from duoka.frameworks.keras.seeds_of_replicas import global_seed_variable, seed_variables, state_for
from duoka.frameworks.keras.terms import MOST_FACTORS, ROWS, START, Terms
from duoka.frameworks.keras.torch_untouched import watching_writes
from duoka.frameworks.keras.trackers import tracking
from duoka.frameworks.replacing import shadowing
from duoka.frameworks.torch.randomness import seeded


class TorchBackend(Backend):
    def __init__(self, model: Any, terms: Terms, tell: Callable[[str], None], *, is_training: bool) -> None:
        self.model, self._terms, self._tell, self.is_training = model, terms, tell, is_training
        self._batch = 0
        self.seeds: list[Any] = []
        self._starts: list[Array] = []
        self._state_variables: list[Any] = []
        self._variables: list[Any] = []
        self._positions: list[int] | None = None
        self._draws = False  # from PyTorch's own generator
        self._recorder: Recorder | None = None  # kept from run to run
        self._metric_variables: list[Any] = []
        self._logs = Logs(model, tell)
        self.moving: list[Any] = []
        self.others: list[Any] = []
        if model.jit_compile:
            tell("jit_compile=True: on PyTorch the steps of replicas run without torch.compile")

    def begin_batch(self, number: int, state: Any = None) -> None:
        self._batch = number
        self.seeds = [*seed_variables(self.model), global_seed_variable()]
        self._starts = [_array(seed.value).copy() for seed in self.seeds]
        known = [*self.model.non_trainable_variables, *self.seeds]
        self._state_variables = list({id(variable): variable for variable in known}.values())
        self._find_metrics()

    @property
    def state(self) -> Any:
        return None

    def cut(self, batch: Any, rows: range) -> Any:
        """Copies: on PyTorch Keras multiplies sample weights by masks in place."""
        return cut(batch, rows, take=copy_of)

    def _find_metrics(self) -> None:
        """Their variables, which the first run may make: a recorder of before does not know them."""
        known, self._metric_variables = self._metric_variables, self.model.metrics_variables
        if len(known) != len(self._metric_variables):
            self._recorder = None

    # One replica.

    def compute(self, rows: Any, replica: int, factors: Array) -> Outcome:
        metrics = self._metric_variables
        watched = self._all_variables if self._positions is None else [*self.moving, *self.others]
        saved = [variable.value.detach().clone() for variable in [*watched, *metrics]]
        with torch.no_grad():
            for variable, start in zip(self.seeds, self._starts, strict=True):
                variable.value.copy_(torch.as_tensor(state_for(start, replica)))
            for variable in metrics:
                variable.value.fill_(float(factors[START]))
        recorder = self._recorder or Recorder(self.model, is_training=self.is_training)
        is_first = self._positions is None and self.is_training
        try:
            number = derive("keras body", self._batch, replica)
            with (
                seeded(number),
                recorder.watching(),
                self._terms.watching(factors),
                tracking(float(factors[ROWS])),
                self._logs.watching(),
                watching_writes(self.model, recorder) if is_first else nullcontext(),
            ):
                before = torch.get_rng_state() if is_first else None
                reported = self._step(rows)
                self._draws = self._draws or (before is not None and not torch.equal(before, torch.get_rng_state()))
            self._learn(recorder, reported)
            return self._read(recorder, reported, float(factors[START]))
        finally:
            with torch.no_grad():
                for variable, value in zip([*watched, *metrics], saved, strict=True):
                    variable.value.copy_(value)
                for variable, start in zip(self.seeds, self._starts, strict=True):
                    variable.value.copy_(torch.as_tensor(start))

    @property
    def is_random(self) -> bool:
        return self._draws or super().is_random

    @property
    def _all_variables(self) -> list[Any]:
        """Weights, too: the first run may turn out to be one that writes to them by itself."""
        known = [*self._state_variables, *self.model.trainable_variables]
        return list({id(variable): variable for variable in known}.values())

    def _step(self, rows: Any) -> Any:
        if self.is_training:
            return self.model.train_step(rows)
        with torch.no_grad():
            return self.model.test_step(rows)

    def count(self, rows: Any, replica: int) -> Array:
        """The forward pass is enough, where the step asks the optimizer to scale the loss, as Keras's own does."""
        stopping = shadowing(self.model.optimizer, {"scale_loss": _stop}) if self.is_training else nullcontext()
        with stopping, suppress(_AllCounted):
            self.compute(rows, replica, np.ones(MOST_FACTORS, np.float32))
        return np.array([float(count) for count in self._terms.denominators], np.float64)

    def _learn(self, recorder: Recorder, reported: Any) -> None:
        """The first run shows what a step changes; later ones must do the same."""
        gradients = recorder.gradients or []
        positions = [position for position, gradient in enumerate(gradients) if gradient is not None]
        self._recorder = recorder
        if self._positions is None:
            self._find_metrics()
            self._positions, self._variables = positions, recorder.variables
            changed = [variable for variable in self._state_variables if id(variable) in recorder.changed]
            self.moving = [variable for variable in changed if variable.value.is_floating_point()]
            self.others = [variable for variable in changed if not variable.value.is_floating_point()]
            self._logs.learn(reported, metric_results(self.model), recorder.counted)
        if [id(variable) for variable in recorder.variables] != [id(variable) for variable in self._variables]:
            raise MismatchError(
                "The step trains other variables than it did before.",
                why="layers were frozen or unfrozen since the model was compiled.",
                do="compile the model again when that changes.",
            )
        known = {id(variable) for variable in (*self.moving, *self.others)}
        new = [variable.path for key, variable in recorder.changed.items() if key not in known]
        new += [self._variables[position].path for position in positions if position not in self._positions]
        if new:
            raise MismatchError(
                f"The train_step changed or used {', '.join(new[:5])}, which the first run did not.",
                why="replicas exchange what the first run of a step has used and changed.",
                do="let the step do the same in every batch, or compile the model again when that changes.",
            )

    def _read(self, recorder: Recorder, reported: Any, start: float) -> Outcome:
        gradients: list[Any] = recorder.gradients or []
        present = []
        for position in self._positions or []:
            gradient = gradients[position]
            present.append(torch.zeros_like(self._variables[position].value) if gradient is None else gradient)
        # The gradients are this run's own; the state is copied, because the variables get their old values back.
        return Outcome(
            [_array(gradient) for gradient in present],
            [_array(variable.value).copy() for variable in self.moving],
            [_array(variable.value).copy() for variable in self.others],
            [_array(variable.value - variable.value.new_tensor(start)) for variable in self._metric_variables],
            [np.asarray(_number(reported[name]), np.float32) for name in self._logs.own],
            None if self.rate is None else float(self.rate.value),
        )

    # All replicas.

    def apply(self, total: Total) -> dict[str, Any]:
        gradients, moving, logs, metrics = total.parts(total.flats)
        _assign([*self.moving, *self.others], [*moving, *total.others])
        with torch.no_grad():
            for variable, added in zip(self._metric_variables, metrics, strict=True):
                variable.value.add_(tensor_of(added).to(variable.value.device))
            full: list[Any] = [None] * len(self._variables)
            for position, gradient in zip(self._positions or [], gradients, strict=True):
                like = self._variables[position].value
                full[position] = tensor_of(gradient).to(like.device, like.dtype)
            if self.is_training and self._variables:
                self.model.optimizer.apply(full, self._variables)
            results = metric_results(self.model, self._logs.names)
        return self._logs.assemble(results, logs)


class _AllCounted(Exception):
    pass


def _stop(loss: Any) -> Any:
    raise _AllCounted


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def _array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu().contiguous()
    return as_array(tensor) if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _assign(variables: Sequence[Any], values: Sequence[Array]) -> None:
    with torch.no_grad():
        for variable, value in zip(variables, values, strict=True):
            variable.value.copy_(tensor_of(value))
