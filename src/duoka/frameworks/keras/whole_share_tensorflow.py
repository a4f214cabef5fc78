"""Whole-share mode on TensorFlow: the step is one graph, which calls out to exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree

from duoka.collectives.arrays import Array
from duoka.errors import MismatchError
from duoka.frameworks.exchange.outcome import Outcome
from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.keras.host_tensorflow import TensorFlowHost
from duoka.frameworks.keras.logs import metric_results
from duoka.frameworks.keras.raw_variables import traced_anew
from duoka.frameworks.keras.seeds_of_replicas import global_seed_variable, seed_variables, state_for
from duoka.frameworks.keras.share_backend import ShareBackend, bring_back_seeds
from duoka.frameworks.keras.tensorflow_rows import cut, has_rows, read
from duoka.frameworks.keras.tensorflow_targets import Targets
from duoka.frameworks.keras.untracked_random import draws_outside, say_random


class TensorFlowShare(ShareBackend):
    def __init__(self, model: Any, wire: Wire, tell: Callable[[str], None], *, sync_batchnorm: bool) -> None:
        super().__init__(model, wire, TensorFlowHost(wire), tell, sync_batchnorm=sync_batchnorm)
        self._functions: dict[str, Callable[..., Any]] = {}
        self._finish_function: Any = None
        self._seeds: list[Any] = []
        self._is_compiled = bool(model.jit_compile) and wire.is_alone
        if model.jit_compile and not wire.is_alone:
            if sync_batchnorm and _asks_for_compiler(model):
                raise MismatchError(
                    "sync_batchnorm=True does not go with jit_compile=True on TensorFlow.",
                    why="statistics are exchanged in the middle of the step, and XLA cannot call out of it.",
                    do="leave jit_compile out, or run on JAX.",
                )
            tell("jit_compile=True: on TensorFlow a step in whole-share mode runs without XLA, which cannot call out")

    def begin_batch(self, number: int, state: Any = None) -> None:
        self._seeds = [*seed_variables(self._model), global_seed_variable()]

    @property
    def state(self) -> Any:
        return None

    def read(self, batch: Any) -> Any:
        return read(batch)

    def cut(self, batch: Any, rows: range) -> Any:
        return cut(batch, rows)

    def compute(self, rows: Any, replica: int, factor: float) -> Outcome:
        metrics = self._model.metrics_variables
        self._counted = [_array(variable) for variable in metrics]
        starts = [_array(seed) for seed in self._seeds]
        for seed, start in zip(self._seeds, starts, strict=True):
            seed.value.assign(state_for(start, replica))
        for variable in metrics:
            variable.value.assign(tf.zeros_like(variable.value))
        leaves = [tf.convert_to_tensor(leaf) for leaf in tree.flatten(rows) if leaf is not None]
        function = self._function_for(rows, leaves)
        try:
            logs = function(leaves, tf.constant(factor, tf.float32))
        except Exception:
            self._wire.raise_failure()
            raise
        finally:
            ends = bring_back_seeds(starts, [_array(seed) for seed in self._seeds])
            for seed, end in zip(self._seeds, ends, strict=True):
                seed.value.assign(end)
        added = [_array(variable) for variable in self._model.metrics_variables]
        self._counted += [np.zeros_like(more) for more in added[len(self._counted) :]]  # made by the first run
        return Outcome(
            [],
            [_array(variable) for variable in self._moving],
            [_array(variable) for variable in self._others],
            added,
            [np.asarray(log) for log in logs],
        )

    @property
    def _state_changed(self) -> list[Any]:
        seeds = {id(seed) for seed in self._seeds}
        return [variable for key, variable in self._changed.items() if key not in seeds]

    @property
    def _moving(self) -> list[Any]:
        return [variable for variable in self._state_changed if variable.value.dtype.is_floating]

    @property
    def _others(self) -> list[Any]:
        return [variable for variable in self._state_changed if not variable.value.dtype.is_floating]

    def _function_for(self, rows: Any, leaves: Sequence[Any]) -> Callable[..., Any]:
        """For any number of rows, as `fit` compiles it: Keras counts losses differently where it knows the number."""
        structure = tree.map_structure(lambda leaf: None if leaf is None else 0, rows)
        specs = [tf.TensorSpec([None, *leaf.shape[1:]] if len(leaf.shape) else [], leaf.dtype) for leaf in leaves]
        key = f"{structure} {specs}"
        if key not in self._functions:

            def step(given: Sequence[Any], factor: Any) -> list[Any]:
                remaining = iter(given)
                data = tree.map_structure(lambda leaf: None if leaf is None else next(remaining), structure)
                return self._step(data, factor)

            self._functions[key] = (
                step
                if self._model.run_eagerly
                else tf.function(
                    step,
                    input_signature=[specs, tf.TensorSpec([], tf.float32)],
                    autograph=False,
                    jit_compile=self._is_compiled,
                )
            )
        return self._functions[key]

    def _step(self, data: Any, factor: Any) -> list[Any]:
        with self._exchanging(factor), Targets(factor).watching():
            reported = traced_anew(self._model.train_step)(data)
        if draws_outside():
            self._tell(say_random(self._model))
        return self._logs.learn(reported, metric_results(self._model), self._updated)

    def _exchange(self, gradients: list[Any]) -> list[Any]:
        """Slices of rows apart from the others: they are put behind each other, not added up."""
        if self._wire.is_alone:
            return gradients
        is_sparse = [has_rows(gradient, is_eager=self._model.run_eagerly) for gradient in gradients]
        dense = super()._exchange(
            [
                None if sparse or gradient is None else tf.convert_to_tensor(gradient)
                for gradient, sparse in zip(gradients, is_sparse, strict=True)
            ]
        )
        return [
            self._gather(gradient) if sparse else exchanged
            for gradient, sparse, exchanged in zip(gradients, is_sparse, dense, strict=True)
        ]

    def _gather(self, slices: Any) -> Any:
        like = [([None], slices.indices.dtype.name), ([None, *slices.values.shape[1:]], slices.values.dtype.name)]
        gather = self._wire.gather_or_add_slices if self._model.run_eagerly else self._wire.gather_slices
        indices, values = self._host.call(gather, [slices.indices, slices.values], like)
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def apply(self, moving: dict[int, Array], others: dict[int, Array], total: Outcome) -> dict[str, Any]:
        for variables, values in ((self._moving, moving), (self._others, others)):
            for position, value in values.items():
                variables[position].value.assign(value)
        counted = [tf.convert_to_tensor(old + new) for old, new in zip(self._counted, total.metrics, strict=True)]
        if self._finish_function is None:
            finish = self._finish
            self._finish_function = finish if self._model.run_eagerly else tf.function(finish, autograph=False)
        results = self._finish_function(counted)
        return self._logs.assemble(results, total.logs)

    def _finish(self, counted: Sequence[Any]) -> dict[str, Any]:
        for variable, value in zip(self._model.metrics_variables, counted, strict=True):
            variable.value.assign(value)
        return self._logs.pick(metric_results(self._model))


def _asks_for_compiler(model: Any) -> bool:
    """Whether jit_compile=True was the user's choice, not what "auto" comes to on a card."""
    return bool(model.jit_compile) and not tf.config.list_physical_devices("GPU")


def _array(variable: Any) -> Array:
    """A copy: TensorFlow lends the memory of its variables, and adds to them in place."""
    return np.array(variable.value)
