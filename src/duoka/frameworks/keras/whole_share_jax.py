"""Whole-share mode on JAX: the step is one function of the state that `fit` hands on, and calls out to exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from keras import StatelessScope

from duoka.collectives.arrays import Array
from duoka.frameworks.exchange.outcome import Outcome
from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.keras.data import cut
from duoka.frameworks.keras.host_jax import JaxHost
from duoka.frameworks.keras.learning_rate import rate_of
from duoka.frameworks.keras.logs import metric_results
from duoka.frameworks.keras.seeds_of_replicas import seed_variables, state_for
from duoka.frameworks.keras.share_backend import ShareBackend, bring_back_seeds

State = tuple[list[Any], list[Any], list[Any], list[Any]]  # weights, other state, optimizer, metrics


class JaxShare(ShareBackend):
    def __init__(self, model: Any, wire: Wire, tell: Callable[[str], None], *, sync_batchnorm: bool) -> None:
        super().__init__(model, wire, JaxHost(wire), tell, sync_batchnorm=sync_batchnorm)
        self._state: State = ([], [], [], [])
        self._seeds_at: list[int] = []
        self._changed_at: set[int] = set()
        # Nothing is donated: when an exchange fails, `fit` still has the state from before the step.
        is_compiled = model.jit_compile and not model.run_eagerly
        self._step_function: Any = jax.jit(self._step) if is_compiled else self._step
        self._finish_function: Any = jax.jit(self._finish) if is_compiled else self._finish

    def begin_batch(self, number: int, state: Any = None) -> None:
        self._state = tuple(map(list, state))  # type: ignore[assignment]
        positions = {id(variable): position for position, variable in enumerate(self._model.non_trainable_variables)}
        self._seeds_at = [positions[id(seed)] for seed in seed_variables(self._model) if id(seed) in positions]

    @property
    def state(self) -> Any:
        return self._state

    def learning_rate(self) -> float | None:
        rate = rate_of(self._model.optimizer)
        for variable, value in zip(self._model.optimizer.variables, self._state[2], strict=True):
            if variable is rate:
                return float(value)
        return None

    def cut(self, batch: Any, rows: range) -> Any:
        return cut(batch, rows)

    def compute(self, rows: Any, replica: int, factor: float) -> Outcome:
        weights, other, optimizer, metrics = self._state
        starts = [np.asarray(other[position]) for position in self._seeds_at]
        given = list(other)
        for position, start in zip(self._seeds_at, starts, strict=True):
            given[position] = state_for(start, replica)
        zeros = [np.zeros(value.shape, value.dtype) for value in metrics]
        try:
            results = self._step_function(weights, given, optimizer, zeros, np.float32(factor), rows)
            weights, after, optimizer, added, logs = jax.block_until_ready(results)
        finally:
            self._wire.raise_failure()
        ends = bring_back_seeds(starts, [np.asarray(after[position]) for position in self._seeds_at])
        for position, end in zip(self._seeds_at, ends, strict=True):
            after[position] = jax.device_put(end)
        self._state = (weights, after, optimizer, metrics)
        return Outcome(
            [],
            [np.asarray(after[position]) for position in self._moving_at],
            [np.asarray(after[position]) for position in self._others_at],
            [np.asarray(value) for value in added],
            [np.asarray(value) for value in logs],
        )

    @property
    def _moving_at(self) -> list[int]:
        other = self._state[1]
        is_float = [jax.numpy.issubdtype(value.dtype, jax.numpy.inexact) for value in other]
        return [position for position in sorted(self._changed_at) if is_float[position]]

    @property
    def _others_at(self) -> list[int]:
        moving = set(self._moving_at)
        return [position for position in sorted(self._changed_at) if position not in moving]

    def _step(self, weights: Any, other: Any, optimizer: Any, metrics: Any, factor: Any, rows: Any) -> Any:
        metrics = list(map(jax.numpy.asarray, metrics))  # Keras hands on what is an array of JAX already
        with self._exchanging(factor):
            state = (weights, other, optimizer, metrics)
            reported, (weights, after, optimizer, counted) = self._model.train_step(state, rows)
        # What comes out as it went in is not compared between workers.
        self._changed_at |= {n for n, (old, new) in enumerate(zip(other, after, strict=True)) if new is not old}
        self._changed_at -= set(self._seeds_at)
        pairs = zip(self._model.metrics_variables, metrics, counted, strict=True)
        updated = {id(variable) for variable, old, new in pairs if new is not old}
        own = self._logs.learn(reported, self._results(counted), updated)
        return list(weights), list(after), list(optimizer), list(counted), own

    def _results(self, metrics: Sequence[Any]) -> dict[str, Any]:
        mapping = list(zip(self._model.metrics_variables, metrics, strict=True))
        with StatelessScope(state_mapping=mapping):
            return metric_results(self._model)

    def apply(self, moving: dict[int, Array], others: dict[int, Array], total: Outcome) -> dict[str, Any]:
        weights, other, optimizer, metrics = self._state
        for positions, values in ((self._moving_at, moving), (self._others_at, others)):
            for place, value in values.items():
                other[positions[place]] = jax.device_put(value)
        metrics, results = self._finish_function(metrics, total.metrics)
        self._state = (weights, other, optimizer, metrics)
        return self._logs.assemble(results, total.logs)

    def _finish(self, metrics: Sequence[Any], added: Sequence[Any]) -> Any:
        metrics = [value + more for value, more in zip(metrics, added, strict=True)]
        return metrics, self._logs.pick(self._results(metrics))
