"""Keras on PyTorch: the step runs as it is, replica after replica, and the optimizer once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from duoka.collectives.arrays import Array, as_array
from duoka.data.seeds import derive
from duoka.errors import MismatchError
from duoka.frameworks.keras.backend import Backend
from duoka.frameworks.keras.data import cut
from duoka.frameworks.keras.logs import metric_results, split
from duoka.frameworks.keras.outcome import Outcome
from duoka.frameworks.keras.recorder import Recorder
from duoka.frameworks.keras.seeds_of_replicas import global_seed_variable, seed_variables, state_for
from duoka.frameworks.keras.terms import MOST_FACTORS, Terms
from duoka.frameworks.keras.trackers import tracking
from duoka.frameworks.torch.randomness import seeded


class TorchBackend(Backend):
    def __init__(self, model: Any, terms: Terms, tell: Callable[[str], None], *, is_training: bool) -> None:
        self._model, self._terms, self._tell, self._is_training = model, terms, tell, is_training
        self._batch = 0
        self.seeds: list[Any] = []
        self._starts: list[Array] = []
        self._state_variables: list[Any] = []
        self._variables: list[Any] = []
        self._positions: list[int] | None = None
        self._log_names: list[str] = []
        self._own_logs: list[str] = []
        self.moving: list[Any] = []
        self.others: list[Any] = []
        if model.jit_compile:
            tell("jit_compile=True: on PyTorch the steps of replicas run without torch.compile")

    def begin_batch(self, number: int, state: Any = None) -> None:
        self._batch = number
        shared = global_seed_variable()
        self.seeds = [*seed_variables(self._model), *([] if shared is None else [shared])]
        self._starts = [_array(seed.value).copy() for seed in self.seeds]
        known = [*self._model.non_trainable_variables, *self.seeds]
        self._state_variables = list({id(variable): variable for variable in known}.values())

    @property
    def state(self) -> Any:
        return None

    def learning_rate(self) -> float | None:
        rate: Any = self._model.optimizer._learning_rate if self._is_training else None
        return float(rate.value) if hasattr(rate, "value") else None

    def cut(self, batch: Any, rows: range) -> Any:
        """Copies: on PyTorch Keras multiplies sample weights by masks in place."""
        return cut(batch, rows, take=copy.deepcopy)

    # One replica.

    def compute(self, rows: Any, replica: int, corrections: Array) -> Outcome:
        metrics = self._model.metrics_variables
        watched = self._state_variables if self._positions is None else [*self.moving, *self.others]
        saved = [variable.value.detach().clone() for variable in [*watched, *metrics]]
        with torch.no_grad():
            for variable, start in zip(self.seeds, self._starts, strict=True):
                variable.value.copy_(torch.as_tensor(state_for(start, replica)))
            for variable in metrics:
                variable.value.zero_()
        recorder = Recorder(self._model, is_training=self._is_training)
        try:
            number = derive("keras body", self._batch, replica)
            with (
                seeded(number),
                recorder.watching(),
                self._terms.watching(corrections),
                tracking(self._model, corrections[-1]),
            ):
                reported = self._step(rows)
            self._learn(recorder, reported)
            return self._read(recorder, reported)
        finally:
            with torch.no_grad():
                for variable, value in zip([*watched, *metrics], saved, strict=True):
                    variable.value.copy_(value)
                for variable, start in zip(self.seeds, self._starts, strict=True):
                    variable.value.copy_(torch.as_tensor(start))

    def _step(self, rows: Any) -> Any:
        if self._is_training:
            return self._model.train_step(rows)
        with torch.no_grad():
            return self._model.test_step(rows)

    def count(self, rows: Any, replica: int) -> Array:
        self.compute(rows, replica, np.ones(MOST_FACTORS, np.float32))
        return np.array([float(count) for count in self._terms.denominators], np.float64)

    def _learn(self, recorder: Recorder, reported: Any) -> None:
        """The first run shows what a step changes; later ones must do the same."""
        gradients = recorder.gradients or []
        positions = [position for position, gradient in enumerate(gradients) if gradient is not None]
        if self._positions is None:
            self._positions, self._variables = positions, recorder.variables
            changed = [variable for variable in self._state_variables if id(variable) in recorder.changed]
            self.moving = [variable for variable in changed if variable.value.is_floating_point()]
            self.others = [variable for variable in changed if not variable.value.is_floating_point()]
            self._log_names, own = split(reported, metric_results(self._model), self._tell)
            self._own_logs = list(own)
        known = {id(variable) for variable in (*self.moving, *self.others)}
        new = [variable.path for key, variable in recorder.changed.items() if key not in known]
        new += [self._variables[position].path for position in positions if position not in self._positions]
        if new:
            raise MismatchError(
                f"The train_step changed or used {', '.join(new[:5])}, which the first run did not.",
                why="replicas exchange what the first run of a step has used and changed.",
                do="let the step do the same in every batch, or compile the model again when that changes.",
            )

    def _read(self, recorder: Recorder, reported: Any) -> Outcome:
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
            [_array(variable.value).copy() for variable in self._model.metrics_variables],
            [np.asarray(float(reported[name]), np.float32) for name in self._own_logs],
        )

    # All replicas.

    def apply(self, total: Outcome) -> dict[str, Any]:
        _assign([*self.moving, *self.others], [*total.moving, *total.others])
        with torch.no_grad():
            for variable, added in zip(self._model.metrics_variables, total.metrics, strict=True):
                variable.value.add_(torch.as_tensor(added, device=variable.value.device))
            full: list[Any] = [None] * len(self._variables)
            for position, gradient in zip(self._positions or [], total.gradients, strict=True):
                like = self._variables[position].value
                full[position] = torch.as_tensor(gradient, dtype=like.dtype, device=like.device)
            if self._is_training:
                self._model.optimizer.apply(full, self._variables)
            results = metric_results(self._model)
        own = dict(zip(self._own_logs, total.logs, strict=True))
        return {name: own[name] if name in own else results[name] for name in self._log_names}


def _array(tensor: torch.Tensor) -> Array:
    return as_array(tensor.detach().cpu().contiguous())


def _assign(variables: Sequence[Any], values: Sequence[Array]) -> None:
    with torch.no_grad():
        for variable, value in zip(variables, values, strict=True):
            variable.value.copy_(torch.as_tensor(value))
