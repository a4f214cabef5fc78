"""Keras on TensorFlow: a graph that computes one replica's gradients, and one that applies the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree

from duoka.collectives.arrays import Array, as_array
from duoka.frameworks.keras.backend import Backend
from duoka.frameworks.keras.logs import metric_results, split
from duoka.frameworks.keras.outcome import Outcome, Slices
from duoka.frameworks.keras.recorder import Recorder
from duoka.frameworks.keras.seeds_of_replicas import global_seed_variable, seed_variables, state_for
from duoka.frameworks.keras.terms import MOST_FACTORS, Terms
from duoka.frameworks.keras.trackers import tracking


class TensorFlowBackend(Backend):
    def __init__(self, model: Any, terms: Terms, tell: Callable[[str], None], *, is_training: bool) -> None:
        self._model, self._terms, self._tell, self._is_training = model, terms, tell, is_training
        self._gradient_functions: dict[Any, Callable[..., Any]] = {}
        self._apply_function: Callable[..., Any] | None = None
        self._specs: dict[Any, list[Any]] = {}
        self._starts: list[Array] = []
        self.seeds: list[Any] = []
        self._is_sparse: list[bool] = []
        self._positions: list[int] = []
        self._variables: list[Any] = []
        self._log_names: list[str] = []
        self._own_logs: list[str] = []
        self.moving: list[Any] = []
        self.others: list[Any] = []

    def begin_batch(self, number: int, state: Any = None) -> None:
        shared = global_seed_variable()
        self.seeds = [*seed_variables(self._model), *([] if shared is None else [shared])]
        self._starts = [seed.numpy() for seed in self.seeds]

    @property
    def state(self) -> Any:
        return None

    def learning_rate(self) -> float | None:
        rate: Any = self._model.optimizer._learning_rate if self._is_training else None
        return float(rate.numpy()) if hasattr(rate, "numpy") else None

    def cut(self, batch: Any, rows: range) -> Any:
        return tree.map_structure(lambda leaf: None if _is_none(leaf) else leaf[rows.start : rows.stop], batch)

    # One replica.

    def compute(self, rows: Any, replica: int, corrections: Array) -> Outcome:
        outputs = self._run(rows, replica, corrections, is_counting=False)
        gradients, moving, others, metrics, logs = outputs
        return Outcome(
            [_as_slices(part) if isinstance(part, (list, tuple)) else as_array(part) for part in gradients],
            *([as_array(part) for part in parts] for parts in (moving, others, metrics, logs)),
        )

    def count(self, rows: Any, replica: int) -> Array:
        counts = self._run(rows, replica, np.ones(MOST_FACTORS, np.float32), is_counting=True)
        return np.array([float(count) for count in counts], np.float64)

    def _run(self, rows: Any, replica: int, corrections: Array, *, is_counting: bool) -> Any:
        leaves = [tf.convert_to_tensor(leaf) for leaf in tree.flatten(rows) if not _is_none(leaf)]
        seeds = [tf.constant(state_for(start, replica)) for start in self._starts]
        function = self._function_for(rows, leaves, is_counting)
        return function(leaves, seeds, tf.constant(corrections))

    def _function_for(self, rows: Any, leaves: Sequence[Any], is_counting: bool) -> Callable[..., Any]:
        """Traced for any number of rows: which numbers a worker meets first must not matter."""
        structure = str(tree.map_structure(lambda leaf: not _is_none(leaf), rows))
        kind = (structure, tuple((leaf.dtype.name, len(leaf.shape)) for leaf in leaves), len(self.seeds), is_counting)
        shapes = [[None, *leaf.shape[1:]] if len(leaf.shape) else [] for leaf in leaves]
        known = self._specs.get(kind)
        if known is not None:
            shapes = [_generalise(old, new) for old, new in zip(known, shapes, strict=True)]
        self._specs[kind] = shapes
        key = (kind, str(shapes))
        if key not in self._gradient_functions:
            self._gradient_functions[key] = self._compile(rows, leaves, shapes, is_counting)
        return self._gradient_functions[key]

    def _compile(self, rows: Any, leaves: Sequence[Any], shapes: Sequence[Any], is_counting: bool) -> Any:
        def step(given: Sequence[Any], seeds: Sequence[Any], corrections: Any) -> Any:
            remaining = iter(given)
            data = tree.map_structure(lambda leaf: None if _is_none(leaf) else next(remaining), rows_like)
            return self._trace(data, seeds, corrections, is_counting)

        rows_like = tree.map_structure(lambda leaf: None if _is_none(leaf) else 0, rows)
        if self._model.run_eagerly:
            return step
        data = [tf.TensorSpec(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)]
        seeds = [tf.TensorSpec([2], seed.dtype) for seed in self.seeds]
        signature = [data, seeds, tf.TensorSpec([MOST_FACTORS], tf.float32)]
        return tf.function(
            step, input_signature=signature, autograph=False, jit_compile=self._model.jit_compile and not is_counting
        )

    def _trace(self, data: Any, seeds: Sequence[Any], corrections: Any, is_counting: bool) -> Any:
        model, metrics = self._model, self._model.metrics_variables
        state = _distinct([*model.non_trainable_variables, *self.seeds])
        before = {id(variable): tf.identity(variable.value) for variable in [*state, *metrics]}
        for variable, seed in zip(self.seeds, seeds, strict=True):
            variable.value.assign(seed)
        for variable in metrics:
            variable.value.assign(tf.zeros_like(variable.value))
        recorder = Recorder(model, is_training=self._is_training)
        with recorder.watching(), self._terms.watching(corrections), tracking(model, corrections[-1]):
            reported = model.train_step(data) if self._is_training else model.test_step(data)
        changed = [variable for variable in state if id(variable) in recorder.changed]
        self.moving = [variable for variable in changed if variable.value.dtype.is_floating]
        self.others = [variable for variable in changed if not variable.value.dtype.is_floating]
        self._log_names, own = split(reported, metric_results(model), self._tell)
        self._own_logs = list(own)
        outcome = (
            self._describe_gradients(recorder),
            [tf.identity(variable.value) for variable in self.moving],
            [tf.identity(variable.value) for variable in self.others],
            [tf.identity(variable.value) for variable in metrics],
            list(own.values()),
        )
        counts = [tf.convert_to_tensor(count, tf.float32) for count in self._terms.denominators]
        for variable in _distinct([*changed, *self.seeds, *metrics]):
            variable.value.assign(before[id(variable)])
        return counts if is_counting else outcome

    def _describe_gradients(self, recorder: Recorder) -> list[Any]:
        gradients = recorder.gradients or []
        self._variables = recorder.variables
        self._positions = [position for position, gradient in enumerate(gradients) if gradient is not None]
        present = [gradients[position] for position in self._positions]
        self._is_sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in present]
        return [
            [tf.cast(gradient.indices, tf.int64), gradient.values] if is_sparse else tf.convert_to_tensor(gradient)
            for gradient, is_sparse in zip(present, self._is_sparse, strict=True)
        ]

    # All replicas.

    def apply(self, total: Outcome) -> dict[str, Any]:
        if self._apply_function is None:
            self._apply_function = self._compile_apply(total)
        results = self._apply_function(
            [
                [part.indices, part.values] if isinstance(part, Slices) else tf.convert_to_tensor(part)
                for part in total.gradients
            ],
            *([tf.convert_to_tensor(part) for part in parts] for parts in (total.moving, total.others, total.metrics)),
        )
        own = dict(zip(self._own_logs, total.logs, strict=True))
        return {name: own[name] if name in own else results[name] for name in self._log_names}

    def _compile_apply(self, total: Outcome) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return self._apply
        gradients = [
            [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, *part.values.shape[1:]], part.values.dtype)]
            if isinstance(part, Slices)
            else tf.TensorSpec(part.shape, part.dtype)
            for part in total.gradients
        ]
        rest = [
            [tf.TensorSpec(part.shape, part.dtype) for part in parts]
            for parts in (total.moving, total.others, total.metrics)
        ]
        signature = [gradients, *rest]
        return tf.function(self._apply, input_signature=signature, autograph=False, jit_compile=self._model.jit_compile)

    def _apply(self, gradients: Any, moving: Any, others: Any, metrics: Any) -> dict[str, Any]:
        for variables, values in ((self.moving, moving), (self.others, others)):
            for variable, value in zip(variables, values, strict=True):
                variable.value.assign(value)
        for variable, added in zip(self._model.metrics_variables, metrics, strict=True):
            variable.value.assign_add(added)
        full: list[Any] = [None] * len(self._variables)
        for position, is_sparse, part in zip(self._positions, self._is_sparse, gradients, strict=True):
            if is_sparse:
                shape = tf.constant(list(self._variables[position].shape), tf.int64)
                full[position] = tf.IndexedSlices(part[1], part[0], shape)
            else:
                full[position] = part
        if self._is_training:
            self._model.optimizer.apply(full, self._variables)
        results = metric_results(self._model)
        return {name: results[name] for name in self._log_names if name in results}


def _is_none(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, tf.experimental.Optional)


def _distinct(variables: Sequence[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _generalise(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    return [a if a == b else None for a, b in zip(old, new, strict=True)]


def _as_slices(pair: Sequence[Any]) -> Slices:
    return Slices(as_array(pair[0]), as_array(pair[1]))
