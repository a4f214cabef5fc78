"""Keras on JAX: two pure functions of the state that `fit` hands on, one for gradients and one to apply their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from keras import StatelessScope

from duoka.collectives.arrays import Array
from duoka.frameworks.exchange.outcome import Outcome, Total
from duoka.frameworks.keras.backend import Backend
from duoka.frameworks.keras.data import cut
from duoka.frameworks.keras.logs import Logs, metric_results
from duoka.frameworks.keras.recorder import Recorder
from duoka.frameworks.keras.seeds_of_replicas import seed_variables, state_for
from duoka.frameworks.keras.terms import MOST_FACTORS, ROWS, START, Terms
from duoka.frameworks.keras.trackers import tracking

State = tuple[list[Any], list[Any], list[Any], list[Any]]  # weights, other state, optimizer, metrics


class JaxBackend(Backend):
    def __init__(self, model: Any, terms: Terms, tell: Callable[[str], None], *, is_training: bool) -> None:
        self.model, self._terms, self._tell, self.is_training = model, terms, tell, is_training
        self._state: State = ([], [], [], [])
        self._starts: list[Array] = []
        self._seeds_at: list[int] = []
        self._num_placed = -1  # variables among which they were found
        self._moving_at: list[int] = []
        self._others_at: list[int] = []
        self._logs = Logs(model, tell)
        self._is_known = False
        self._gradient_function: Any = None
        self._count_function: Any = None
        self._apply_function: Any = None
        self._applies: Any = None  # the key of totals that it takes
        self.seeds: list[Any] = []
        self.moving: list[Any] = []
        self.others: list[Any] = []

    def begin_batch(self, number: int, state: Any = None) -> None:
        if not self.is_training:  # `evaluate` leaves the optimizer out
            state = (state[0], state[1], [], state[2])
        self._state = state
        if len(state[1]) != self._num_placed:  # to walk through a model takes 0.2 ms
            self._place_seeds()
        self._starts = [np.asarray(state[1][position]) for position in self._seeds_at]

    def _place_seeds(self) -> None:
        variables = self.model.non_trainable_variables
        positions = {id(variable): position for position, variable in enumerate(variables)}
        self.seeds = [seed for seed in seed_variables(self.model) if id(seed) in positions]
        self._seeds_at = [positions[id(seed)] for seed in self.seeds]
        self._num_placed = len(variables)

    @property
    def state(self) -> Any:
        weights, other, optimizer, metrics = self._state
        return (weights, other, optimizer, metrics) if self.is_training else (weights, other, metrics)

    def cut(self, batch: Any, rows: range) -> Any:
        return cut(batch, rows)

    # One replica.

    def compute(self, rows: Any, replica: int, factors: Array) -> Outcome:
        arguments = self._arguments(rows, replica, factors)
        if not self._is_known:
            self._find_out(arguments)
        gradients, moving, others, metrics, logs, rates = self._gradient_function(*arguments)
        return Outcome(
            [np.asarray(part) for part in gradients],
            moving=[np.asarray(part) for part in moving],
            others=[np.asarray(part) for part in others],
            metrics=[np.asarray(part) for part in metrics],
            logs=[np.asarray(part) for part in logs],
            rate=float(rates[0]) if rates else None,
        )

    def count(self, rows: Any, replica: int) -> Array:
        arguments = self._arguments(rows, replica, np.ones(MOST_FACTORS, np.float32))
        if not self._is_known:
            self._find_out(arguments)
        return np.array([float(count) for count in self._count_function(*arguments)], np.float64)

    def _arguments(self, rows: Any, replica: int, factors: Array) -> tuple[Any, ...]:
        seeds = [state_for(start, replica) for start in self._starts]
        weights, other, optimizer, metrics = self._state
        return weights, other, optimizer, metrics, seeds, factors, rows

    def _find_out(self, arguments: tuple[Any, ...]) -> None:
        """Trace once to see which state the step changes: what goes in and comes out as it was stays at home."""

        def step(*given: Any) -> Any:
            _, after, _, _, _ = self._run(*given)
            return after

        traced = jax.make_jaxpr(step)(*arguments).jaxpr
        given = set(map(id, traced.invars))
        values = self._state[1]
        changed = [n for n, after in enumerate(traced.outvars) if id(after) not in given or n in self._seeds_at]
        self._moving_at = [n for n in changed if jax.numpy.issubdtype(values[n].dtype, jax.numpy.inexact)]
        self._others_at = [n for n in changed if n not in self._moving_at]
        variables = self.model.non_trainable_variables
        self.moving = [variables[n] for n in self._moving_at]
        self.others = [variables[n] for n in self._others_at]
        compile = self._compile
        self._gradient_function = compile(self._compute)
        self._count_function = compile(lambda *given: self._run(*given)[4])
        self._is_known = True

    def _compile(self, function: Any, **options: Any) -> Any:
        if self.model.run_eagerly or not self.model.jit_compile:
            return function
        return jax.jit(function, **options)

    def _run(
        self, weights: Any, other: Any, optimizer: Any, metrics: Any, seeds: Any, factors: Any, rows: Any
    ) -> tuple[list[Any], list[Any], list[Any], list[Any], list[Any]]:
        start = list(other)
        for position, seed in zip(self._seeds_at, seeds, strict=True):
            start[position] = jax.numpy.asarray(seed)
        recorder = Recorder(self.model, is_training=self.is_training)
        metrics = [jax.numpy.full_like(value, factors[START]) for value in metrics]
        with (
            recorder.watching(),
            self._terms.watching(factors),
            tracking(factors[ROWS]),
            self._logs.watching(),
        ):
            if self.is_training:
                reported, (_, after, _, counted) = self.model.train_step((weights, start, optimizer, metrics), rows)
            else:
                reported, (_, after, counted) = self.model.test_step((weights, start, metrics), rows)
        pairs = zip(self.model.metrics_variables, counted, metrics, strict=True)
        updated = {id(variable) for variable, after, start in pairs if after is not start}
        own = self._logs.learn(reported, self._results(counted), updated)
        counted = [after - start for after, start in zip(counted, metrics, strict=True)]
        gradients = recorder.gradients or []
        return gradients, list(after), counted, own, list(self._terms.denominators)

    def _compute(self, *given: Any) -> tuple[list[Any], ...]:
        gradients, after, counted, own, _ = self._run(*given)
        moving, others = [after[n] for n in self._moving_at], [after[n] for n in self._others_at]
        return gradients, moving, others, counted, own, self._rates(given[2])

    def _rates(self, slots: Sequence[Any]) -> list[Any]:
        """The learning rate, as the one of a list, when it is a variable."""
        if self.rate is None:
            return []
        pairs = zip(self.model.optimizer.variables, slots, strict=True)
        return [slot for variable, slot in pairs if variable is self.rate]

    def _results(self, metrics: Sequence[Any]) -> dict[str, Any]:
        mapping = list(zip(self.model.metrics_variables, metrics, strict=True))
        with StatelessScope(state_mapping=mapping):
            return metric_results(self.model)

    # All replicas.

    def apply(self, total: Total) -> dict[str, Any]:
        if self._applies != total.key:  # compiled for these places
            # The weights and the optimizer's slots are replaced: their memory is used for the new ones.
            options = {"donate_argnums": (0, 1)} if self.is_training else {}
            self._apply_function = self._compile(lambda *given: self._apply(total, *given), **options)
            self._applies = total.key
        weights, other, optimizer, metrics = self._state
        weights, optimizer, metrics, moving, results = self._apply_function(weights, optimizer, metrics, total.flats)
        other = list(other)
        others = map(jax.device_put, total.others)
        for position, value in zip((*self._moving_at, *self._others_at), (*moving, *others), strict=True):
            other[position] = value
        self._state = (weights, other, optimizer, metrics)
        return self._logs.assemble(results, total.parts(total.flats)[2] if self._logs.own else [])

    def _apply(self, total: Total, weights: Any, optimizer: Any, metrics: Any, flats: Any) -> Any:
        gradients, moving, _, added = total.parts(flats, jax.numpy.reshape, jax.numpy.astype)
        if self.is_training and weights:
            weights, optimizer = self.model.optimizer.stateless_apply(optimizer, gradients, weights)
        metrics = [value + more for value, more in zip(metrics, added, strict=True)]
        return weights, optimizer, metrics, moving, self._logs.pick(self._results(metrics))
