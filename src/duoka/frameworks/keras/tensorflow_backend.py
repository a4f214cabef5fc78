"""Keras on TensorFlow: a graph that computes one replica's gradients, and one that applies the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree

from duoka.collectives.arrays import Array, as_array
from duoka.frameworks.exchange.outcome import Outcome, Slices, Total
from duoka.frameworks.keras.backend import Backend
from duoka.frameworks.keras.compiler_choice import refuses_compiler
from duoka.frameworks.keras.logs import Logs, metric_results
from duoka.frameworks.keras.raw_variables import finding_places, traced_anew, watching_raw_variables
from duoka.frameworks.keras.recorder import Recorder
from duoka.frameworks.keras.seeds_of_replicas import global_seed_variable, seed_variables, state_for
from duoka.frameworks.keras.tensorflow_rows import SlicesOfRows, cut, read
from duoka.frameworks.keras.tensorflow_targets import Targets
from duoka.frameworks.keras.terms import MOST_FACTORS, ROWS, START, Terms
from duoka.frameworks.keras.trackers import tracking
from duoka.frameworks.keras.untracked_random import draws_outside, say_random

FEW_VARIABLES = 40


class TensorFlowBackend(Backend):
    """Both graphs are called by their flat lists of tensors: what `tf.function` does in Python takes as long as a
    small step."""

    def __init__(self, model: Any, terms: Terms, tell: Callable[[str], None], *, is_training: bool) -> None:
        self.model, self._terms, self._tell, self.is_training = model, terms, tell, is_training
        self._gradient_functions: dict[Any, _Flat] = {}
        self._apply_function: _Flat | None = None
        self._applies: Any = None  # the key of totals that it takes
        self._shapes: dict[Any, list[Any]] = {}
        self._constants: dict[bytes, Any] = {}
        self._starts: list[Array] = []
        self.seeds: list[Any] = []
        self._is_sparse: list[bool] = []
        self._slices_of_rows = SlicesOfRows(is_eager=model.run_eagerly)
        self._positions: list[int] = []
        self._variables: list[Any] = []
        self._is_compilable = True  # the update, until the compiler says otherwise
        self._logs = Logs(model, tell)
        self.moving: list[Any] = []
        self.others: list[Any] = []

    def begin_batch(self, number: int, state: Any = None) -> None:
        self.seeds = [*seed_variables(self.model), global_seed_variable()]
        self._starts = [as_array(seed.value).copy() for seed in self.seeds]  # half the time of numpy()

    @property
    def state(self) -> Any:
        return None

    @property
    def programs(self) -> Sequence[str]:
        is_compiled = (self.model.jit_compile or self._is_compiled_by_us) and not self.model.run_eagerly
        return [*super().programs, *(["optimizer.apply"] if is_compiled else [])]

    @property
    def _is_compiled_by_us(self) -> bool:
        """XLA makes an optimizer's many small operations one: 4.8 -> 1.6 ms for a small CNN with Nadam. It takes a
        while to compile, the longer the more variables there are; all are known once the model is built."""
        is_wanted = self.is_training and self._is_compilable and not refuses_compiler(self.model)
        return is_wanted and len(self.model.trainable_variables) <= FEW_VARIABLES

    def read(self, batch: Any) -> Any:
        return read(batch)

    def cut(self, batch: Any, rows: range) -> Any:
        return cut(batch, rows)

    # One replica.

    def compute(self, rows: Any, replica: int, factors: Array) -> Outcome:
        def run(part: Any) -> Any:
            return self._run(part, replica, factors, is_counting=False)

        results = run(rows)
        if self._slices_of_rows.learn(run, rows):
            results = run(rows)
        gradients, moving, others, metrics, logs, rates = results
        return Outcome(
            [_as_slices(part) if isinstance(part, (list, tuple)) else as_array(part) for part in gradients],
            moving=[as_array(part) for part in moving],
            others=[as_array(part) for part in others],
            metrics=[as_array(part) for part in metrics],
            logs=[as_array(part) for part in logs],
            rate=float(rates[0]) if rates else None,
        )

    def count(self, rows: Any, replica: int) -> Array:
        counts = self._run(rows, replica, np.ones(MOST_FACTORS, np.float32), is_counting=True)
        return np.array([float(count) for count in counts], np.float64)

    def _run(self, rows: Any, replica: int, factors: Array, *, is_counting: bool) -> Any:
        leaves = tree.flatten(rows)
        given = [leaf for leaf in leaves if leaf is not None]
        seeds = [self._constant(state_for(start, replica)) for start in self._starts]
        return self._function_for(rows, leaves, is_counting)(given, seeds, [self._constant(factors)])

    def _constant(self, array: Array) -> Any:
        """Made once: the same few come again and again."""
        key = array.dtype.char.encode() + array.tobytes()
        if key not in self._constants:
            if len(self._constants) > 1000:
                self._constants.clear()
            self._constants[key] = tf.constant(array)
        return self._constants[key]

    def _function_for(self, rows: Any, leaves: Sequence[Any], is_counting: bool) -> _Flat:
        """Traced for any number of rows: which numbers a worker meets first must not matter."""
        present = [leaf for leaf in leaves if leaf is not None]
        kind = (
            type(rows),
            *(None if leaf is None else (leaf.dtype, len(leaf.shape)) for leaf in leaves),
            len(self.seeds),
            is_counting,
        )
        shapes = [[None, *leaf.shape[1:]] if len(leaf.shape) else [] for leaf in present]
        known = self._shapes.get(kind)
        if known is not None and known != shapes:
            shapes = [_generalise(old, new) for old, new in zip(known, shapes, strict=True)]
        if known != shapes:
            self._shapes[kind] = shapes
            self._gradient_functions[kind] = self._compile(rows, present, shapes, is_counting)
        return self._gradient_functions[kind]

    def _compile(self, rows: Any, leaves: Sequence[Any], shapes: Sequence[Any], is_counting: bool) -> _Flat:
        rows_like = tree.map_structure(lambda leaf: None if leaf is None else 0, rows)

        def step(given: Sequence[Any], seeds: Sequence[Any], factors: Sequence[Any]) -> Any:
            remaining = iter(given)
            data = tree.map_structure(lambda leaf: None if leaf is None else next(remaining), rows_like)
            outcome = self._trace(data, seeds, factors[0], is_counting)
            self._name_random()
            return outcome

        data = [tf.TensorSpec(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)]
        seeds = [tf.TensorSpec([2], seed.dtype) for seed in self.seeds]
        signature = [data, seeds, [tf.TensorSpec([MOST_FACTORS], tf.float32)]]
        jit_compile = self.model.jit_compile and not is_counting
        return _Flat(step, signature, jit_compile=jit_compile, is_eager=self.model.run_eagerly)

    def _name_random(self) -> None:
        if draws_outside():
            self.is_repeatable = False
            self._tell(say_random(self.model))

    def _trace(self, data: Any, seeds: Sequence[Any], factors: Any, is_counting: bool) -> Any:
        model, metrics = self.model, self.model.metrics_variables
        state = _distinct([*model.non_trainable_variables, *self.seeds])
        before = {id(variable): tf.identity(variable.value) for variable in [*state, *metrics]}
        for variable, seed in zip(self.seeds, seeds, strict=True):
            variable.value.assign(seed)
        starts = [tf.fill(variable.shape, tf.cast(factors[START], variable.dtype)) for variable in metrics]
        for variable, start in zip(metrics, starts, strict=True):
            variable.value.assign(start)
        recorder = Recorder(model, is_training=self.is_training, find_place=finding_places())
        targets = Targets(factors[ROWS])
        with (
            recorder.watching(),
            self._terms.watching(factors),
            tracking(factors[ROWS]),
            self._logs.watching(),
            targets.watching(),
            watching_raw_variables(model, recorder, [*state, *metrics]),
        ):
            reported = traced_anew(model.train_step if self.is_training else model.test_step)(data)
        targets.name_changes(model, recorder.gradients or [], self._tell)
        changed = [variable for variable in state if id(variable) in recorder.changed]
        self.moving = [variable for variable in changed if variable.value.dtype.is_floating]
        self.others = [variable for variable in changed if not variable.value.dtype.is_floating]
        own = self._logs.learn(reported, metric_results(model), recorder.counted)
        outcome = (
            self._describe_gradients(recorder),
            [tf.identity(variable.value) for variable in self.moving],
            [tf.identity(variable.value) for variable in self.others],
            [variable.value - start for variable, start in zip(metrics, starts, strict=True)],
            own,
            [] if self.rate is None else [tf.identity(self.rate.value)],
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
        self._is_sparse = [
            self._slices_of_rows.has_rows(gradients[position], self._variables[position])
            for position in self._positions
        ]
        return [
            [tf.cast(gradient.indices, tf.int64), gradient.values] if is_sparse else tf.convert_to_tensor(gradient)
            for gradient, is_sparse in zip(present, self._is_sparse, strict=True)
        ]

    # All replicas.

    def apply(self, total: Total) -> dict[str, Any]:
        slices = [tf.convert_to_tensor(array) for part in total.slices for array in (part.indices, part.values)]
        given = [
            [tf.convert_to_tensor(flat) for flat in total.flats],
            slices,
            list(map(tf.convert_to_tensor, total.others)),
        ]
        if self._apply_function is None or self._applies != total.key:
            self._apply_function, self._applies = self._compile_apply(total, given), total.key
        try:
            results = self._apply_function(*given)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.NotFoundError):
            if self.model.jit_compile or not self._is_compiled_by_us:
                raise
            # Nothing has happened yet: XLA compiles before it runs.
            self._is_compilable = False
            self._apply_function = self._compile_apply(total, given)
            results = self._apply_function(*given)
        return self._logs.assemble(results, total.parts(total.flats)[2] if self._logs.own else [])

    def _compile_apply(self, total: Total, given: Sequence[Any]) -> _Flat:
        flats, slices, others = given
        signature = [
            [tf.TensorSpec(part.shape, part.dtype) for part in flats],
            [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in slices],  # of any number
            [tf.TensorSpec(part.shape, part.dtype) for part in others],
        ]

        def apply(flats: Any, slices: Any, others: Any) -> dict[str, Any]:
            gradients, moving, _, metrics = total.parts(flats, tf.reshape, tf.cast)
            return self._apply(gradients, slices, moving, others, metrics)

        jit_compile = self.model.jit_compile or self._is_compiled_by_us
        return _Flat(apply, signature, jit_compile=jit_compile, is_eager=self.model.run_eagerly)

    def _apply(self, dense: Any, slices: Any, moving: Any, others: Any, metrics: Any) -> dict[str, Any]:
        for variables, values in ((self.moving, moving), (self.others, others)):
            for variable, value in zip(variables, values, strict=True):
                variable.value.assign(value)
        for variable, added in zip(self.model.metrics_variables, metrics, strict=True):
            variable.value.assign_add(added)
        full: list[Any] = [None] * len(self._variables)
        dense, pairs = iter(dense), iter(zip(slices[::2], slices[1::2], strict=True))
        for position, is_sparse in zip(self._positions, self._is_sparse, strict=True):
            if is_sparse:
                indices, values = next(pairs)
                shape = tf.constant(list(self._variables[position].shape), tf.int64)
                full[position] = tf.IndexedSlices(values, indices, shape)
            else:
                full[position] = next(dense)
        if self.is_training and self._variables:
            self.model.optimizer.apply(full, self._variables)
        return self._logs.pick(metric_results(self.model))


class _Flat:
    """A function of nested lists of tensors, as a graph that is called with all of them in one list."""

    def __init__(self, function: Callable[..., Any], signature: Sequence[Any], *, jit_compile: bool, is_eager: bool):
        self._function = function
        self._graph: Any = None
        if not is_eager:
            traced = tf.function(function, input_signature=signature, autograph=False, jit_compile=jit_compile)
            self._graph = traced.get_concrete_function()
            self._traced = traced  # the graph lives no longer than this

    def __call__(self, *given: Any) -> Any:
        if self._graph is None:
            return self._function(*given)
        return self._graph._call_flat(tf.nest.flatten(given), self._graph.captured_inputs)


def _distinct(variables: Sequence[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _generalise(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    return [a if a == b else None for a, b in zip(old, new, strict=True)]


def _as_slices(pair: Sequence[Any]) -> Slices:
    return Slices(as_array(pair[0]), as_array(pair[1]))
