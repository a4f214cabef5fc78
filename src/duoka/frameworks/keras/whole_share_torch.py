"""Whole-share mode on PyTorch: the step runs as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from duoka.collectives.arrays import Array, as_array
from duoka.data.seeds import derive
from duoka.frameworks.exchange.outcome import Outcome
from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.keras.data import cut
from duoka.frameworks.keras.host_torch import TorchHost, copy_of, tensor_of
from duoka.frameworks.keras.logs import metric_results
from duoka.frameworks.keras.seeds_of_replicas import global_seed_variable, seed_variables, state_for
from duoka.frameworks.keras.share_backend import ShareBackend, bring_back_seeds
from duoka.frameworks.torch.randomness import seeded


class TorchShare(ShareBackend):
    def __init__(self, model: Any, wire: Wire, tell: Callable[[str], None], *, sync_batchnorm: bool) -> None:
        super().__init__(model, wire, TorchHost(wire), tell, sync_batchnorm=sync_batchnorm)
        self._batch = 0
        self._seeds: list[Any] = []
        self._counted: list[torch.Tensor] = []
        if model.jit_compile:
            tell("jit_compile=True: on PyTorch a step in whole-share mode runs without torch.compile")

    def begin_batch(self, number: int, state: Any = None) -> None:
        self._batch = number
        self._seeds = [*seed_variables(self._model), global_seed_variable()]

    @property
    def state(self) -> Any:
        return None

    def cut(self, batch: Any, rows: range) -> Any:
        """Copies: on PyTorch Keras multiplies sample weights by masks in place."""
        return cut(batch, rows, take=copy_of)

    def compute(self, rows: Any, replica: int, factor: float) -> Outcome:
        starts = [_array(seed) for seed in self._seeds]
        metrics = self._model.metrics_variables
        self._counted = [variable.value.detach().clone() for variable in metrics]
        _assign(self._seeds, [state_for(start, replica) for start in starts])
        for variable in metrics:
            variable.value.detach().zero_()
        try:
            with seeded(derive("keras body", self._batch, replica)), self._exchanging(factor):
                reported = self._model.train_step(rows)
        except Exception:
            self._wire.raise_failure()  # as it was: Keras writes the name of a layer around it
            raise
        finally:
            _assign(self._seeds, bring_back_seeds(starts, [_array(seed) for seed in self._seeds]))
        own = self._logs.learn(reported, metric_results(self._model), self._updated)
        return Outcome(
            [],
            [_array(variable) for variable in self._moving],
            [_array(variable) for variable in self._others],
            [_array(variable) for variable in self._model.metrics_variables],
            [np.asarray(float(value.detach()), np.float32) for value in own],
        )

    def _mark_weights(self) -> Any:
        """A step may gather gradients by itself, and apply them in a later one."""
        weights = self._model.trainable_variables
        return [(weight.value._version, weight.value.data_ptr()) for weight in weights]

    @property
    def _state_changed(self) -> list[Any]:
        seeds = {id(seed) for seed in self._seeds}
        return [variable for key, variable in self._changed.items() if key not in seeds]

    @property
    def _moving(self) -> list[Any]:
        return [variable for variable in self._state_changed if variable.value.is_floating_point()]

    @property
    def _others(self) -> list[Any]:
        return [variable for variable in self._state_changed if not variable.value.is_floating_point()]

    def apply(self, moving: dict[int, Array], others: dict[int, Array], total: Outcome) -> dict[str, Any]:
        for variables, values in ((self._moving, moving), (self._others, others)):
            _assign([variables[position] for position in values], list(values.values()))
        with torch.no_grad():
            for variable, old, added in zip(self._model.metrics_variables, self._counted, total.metrics, strict=True):
                variable.value.copy_(old + tensor_of(added).to(old.device))
            results = metric_results(self._model, self._logs.names)
        return self._logs.assemble(results, total.logs)


def _array(variable: Any) -> Array:
    return as_array(variable.value.detach().cpu().contiguous()).copy()


def _assign(variables: list[Any], values: list[Array]) -> None:
    with torch.no_grad():
        for variable, value in zip(variables, values, strict=True):
            variable.value.copy_(tensor_of(value))
