"""`run` inside a graph: the step is traced once, and a loop runs it for each replica that the host hands out.

Replicas are never put into one graph side by side: TensorFlow would merge their operations, and change their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from duoka.collectives.arrays import Array
from duoka.frameworks.keras import data
from duoka.frameworks.keras.host_tensorflow import TensorFlowHost
from duoka.frameworks.keras.tensorflow_rows import has_rows
from duoka.frameworks.tensorflow.batches import Arguments
from duoka.frameworks.tensorflow.graphs import (
    drawn_from,
    is_read,
    is_stateful_random,
    is_write,
    only_added_to,
    summing_up,
    variables_of,
    walk,
    written_by,
)
from duoka.frameworks.tensorflow.losses import Losses
from duoka.frameworks.tensorflow.middle import Middle
from duoka.frameworks.tensorflow.order import Order
from duoka.frameworks.tensorflow.outputs import Outputs
from duoka.frameworks.tensorflow.randomness import say_random
from duoka.frameworks.tensorflow.replica import NeedsMiddle, ReplicaContext, Watched
from duoka.frameworks.tensorflow.state import Trained
from duoka.frameworks.tensorflow.step import Step, distinct, trained_by
from duoka.frameworks.tensorflow.turns import NOBODY, Result, Turns
from duoka.frameworks.tensorflow.variables import (
    Merge,
    is_doubtful_sum,
    merge_of,
    raw,
    say_reset,
    say_summed,
    say_written,
)

_NEEDS = [([3], "int64"), ([2], "float64")]  # of a replica: its number and rows, its factors


class GraphRun:
    """One `run` in the text of a graph."""

    def __init__(
        self,
        turns: Turns,
        host: TensorFlowHost,
        order: Order,
        strategy: Any,
        tell: Callable[[str], None],
        agree: Callable[[Sequence[Any]], bool],
        trained: Trained,
        middle: Middle | None,
    ) -> None:
        self._turns, self._host, self._strategy, self._tell, self._agree = turns, host, strategy, tell, agree
        self._trained, self._middle, self._order = trained, middle, order
        self._owners: list[Any] = []

    def run(self, function: Callable[..., Any], name: str, arguments: Arguments, *, jit_compile: Any = None) -> Any:
        body, step = self._trace(function, name, arguments, jit_compile)
        if step.build_optimizers():
            # Once more: one that scales losses by a variable takes a constant before it has the variable.
            body, step = self._trace(function, name, arguments, jit_compile)
        with tf.init_scope():
            self._agree(distinct([*step.variables, *variables_of(body.graph)]))  # those that are only read, too
        step.tell_trained(self._trained)
        is_compiled = jit_compile is not False and arguments.have_known_rows
        is_first = self._host.is_first_in_graph
        with self._order.turn():
            return self._run_all(body, step, arguments, is_compiled=is_compiled, is_first=is_first)

    def _run_all(self, body: Any, step: Step, arguments: Arguments, *, is_compiled: bool, is_first: bool) -> Any:
        before = {id(variable): tf.identity(variable) for variable in step.written}
        seeds = [before[id(seed)] for seed in step.seeds]
        needs = [*_NEEDS, *((list(seed.shape), seed.dtype.name) for seed in step.seeds)]
        total_rows = tf.cast(arguments.count_rows(self._strategy.replicas), tf.int64)

        def begin(total_rows: Array, *arrays: Array) -> list[Array]:
            rows, states = arrays[: len(arguments.rows)], arrays[len(arguments.rows) :]
            arguments.compare({len(part) for part in rows})
            return self._turns.begin(int(total_rows), data.digest(list(rows)), states, is_at_border=is_first)

        first = self._host.call(begin, [total_rows, *arguments.rows, *seeds], needs)
        like = self._like(step)
        nothing = [np.zeros([0] * len(shape), tf.as_dtype(dtype).as_numpy_dtype) for shape, dtype in like]

        def compute(*given: Any) -> list[Any]:
            return self._compute(body, step, arguments, before, given[: len(needs)], [*needs, *like], nothing)

        done = tf.while_loop(
            lambda position, *_: position[0] != NOBODY,
            compute,
            [*first, *(tf.zeros([0] * len(shape), dtype) for shape, dtype in like)],
            shape_invariants=[
                *(tf.TensorShape(shape) for shape, _ in needs),
                *(tf.TensorShape([None] * len(shape)) for shape, _ in like),
            ],
            parallel_iterations=1,
        )
        results = done[len(needs) :]
        for result, (shape, _) in zip(results, like, strict=True):
            result.set_shape(shape)
        # Also what needs no result, as the count of steps, is written when all replicas are through: not before this
        # step's begin has looked at the state.
        with tf.control_dependencies(done):
            return self._finish(step, before, results, is_compiled=is_compiled)

    # One replica.

    def _trace(
        self, function: Callable[..., Any], name: str, arguments: Arguments, jit_compile: Any
    ) -> tuple[Any, Step]:
        watched = Watched(self._middle.exchange if self._middle else None)
        returned: list[Any] = []

        def traced(rows: Sequence[Any], position: Any, factors: Any) -> list[Any]:
            losses = Losses(factors[0], factors[1])
            replica = tf.cast(position[0], tf.int32)
            context = ReplicaContext(self._strategy, replica, losses, self._middle)
            args, kwargs = arguments.with_rows(rows)
            with watched.watching(context):
                outputs = Outputs(function(*args, **kwargs))
            returned[:] = [outputs]
            step = self._step(name, watched, [], [], [], outputs)
            return [*step.gradients, *outputs.numbers, *outputs.arrays]

        specs = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in arguments.rows]
        signature = [specs, tf.TensorSpec([3], tf.int64), tf.TensorSpec([2], tf.float64)]
        compiled = tf.function(traced, input_signature=signature, autograph=False, jit_compile=jit_compile)
        body = compiled.get_concrete_function()
        graph = body.graph
        later: list[Any] = []
        if self._middle is None and watched.updates:
            _refuse_reads(graph, watched)
            later = written_by(graph, since=watched.first_update_at)
            watched.refuse_two_writes(written_by(graph, until=watched.first_update_at), later)
        trained = {id(variable) for variable in trained_by(watched.updates)} if self._middle else set()
        written = [variable for variable in written_by(graph) if id(variable) not in trained]
        drawn = watched.generators.keys() | {id(variable) for variable in drawn_from(graph)}
        seeds = [variable for variable in written if id(variable) in drawn or is_seed(variable)]
        if any(is_stateful_random(operation) for operation, _ in walk(graph)):
            self._tell(say_random(name))
        seed_ids = {id(seed) for seed in seeds}
        counted = watched.counted_ids
        pairs = [
            (variable, merge_of(variable, is_seed=id(variable) in seed_ids, is_counted=id(variable) in counted))
            for variable in written
        ]
        self._name_doubtful(name, graph, pairs)
        self._owners.append(compiled)  # a graph lives no longer than its function
        step = self._step(name, watched, pairs, seeds, later, returned[0])
        if step.slices_like and any(None in leaf.shape[1:] for leaf in arguments.rows):
            why, do = "takes batches of several lengths", "let dataset and function have a fixed length"
            self._tell(say_lengths(f"{name} {why}", do))
        return body, step

    def _name_doubtful(self, name: str, graph: Any, written: Sequence[tuple[Any, Merge]]) -> None:
        added_to = {id(variable) for variable in only_added_to(graph)}
        summed = {id(variable) for variable in summing_up(graph)}
        for variable, merge in written:
            if merge is Merge.SUM and id(variable) not in added_to:
                self._tell(say_reset(variable, name))
            if merge is Merge.MEAN and variable.trainable:
                self._tell(say_written(variable, name))
            if id(variable) in summed and is_doubtful_sum(variable):
                self._tell(say_summed(variable, name))

    def _step(self, name: str, watched: Watched, written: Any, seeds: Any, later: Any, outputs: Outputs) -> Step:
        is_updated = self._middle is not None
        return Step(name, watched.updates, written, seeds, outputs, _is_sparse, later=later, is_updated=is_updated)

    def _compute(
        self,
        body: Any,
        step: Step,
        arguments: Arguments,
        before: dict[int, Any],
        given: Sequence[Any],
        like: Any,
        nothing: list[Array],
    ) -> list[Any]:
        """What the next replica needs, and, after the last one, what all did together instead of nothing."""
        position, factors, *seeds = given
        for variable, seed in zip(step.seeds, seeds, strict=True):
            variable.assign(seed)
        seed_ids = {id(seed) for seed in step.seeds}
        for variable in step.written:
            if id(variable) not in seed_ids:
                variable.assign(before[id(variable)])
        rows = [leaf[position[1] : position[2]] for leaf in arguments.rows]
        for part, leaf in zip(rows, arguments.rows, strict=True):
            part.set_shape([None, *leaf.shape[1:]])
        results = body(rows, position, factors)
        num_gradients = step.num_gradient_arrays
        state = [tf.identity(variable) for variable in [*step.moving, *step.others]]
        sums = [tf.identity(variable) - before[id(variable)] for variable in step.sums]
        arrays = [*results[:num_gradients], *state, *sums, *results[num_gradients:]]

        def deposit(position: Array, rate: Array, *arrays: Array) -> list[Array]:
            next_needs = self._turns.deposit(int(position[0]), step.contents, arrays, float(rate))
            is_last = next_needs[0][0] == NOBODY
            return [*next_needs, *(flatten(self._turns.finish()) if is_last else nothing)]

        return self._host.call(deposit, [position, step.rate, *arrays], like)

    # All of them.

    def _like(self, step: Step) -> list[tuple[list[Any], Any]]:
        """The shapes and types of what all replicas did together."""
        flats = [([count], dtype.name) for dtype, count in step.total_of(self._strategy.replicas).packing.sizes.items()]
        others = [(list(variable.shape), variable.dtype.name) for variable in step.others]
        numbers: list[Any] = []
        for number in step.outputs.numbers:
            mean = "float64" if number.dtype.is_integer else number.dtype.name
            numbers += [([self._strategy.replicas], number.dtype.name), ([], number.dtype.name), ([], mean)]
        arrays: list[Any] = []
        for array in step.outputs.arrays:
            arrays += [([None, *array.shape[1:]], array.dtype.name), ([None], "int32")]
        return [*flats, *step.slices_like, *others, *numbers, *arrays, ([None], "int32"), ([None], "int32")]

    def _finish(self, step: Step, before: dict[int, Any], results: Sequence[Any], *, is_compiled: bool) -> Any:
        total = step.total_of(self._strategy.replicas)
        given = iter(results)
        flat = [next(given) for _ in total.packing.sizes]
        slices = [next(given) for _ in step.slices_like]
        others = [next(given) for _ in step.others]
        numbers = [next(given) for _ in range(3 * len(step.outputs.numbers))]
        arrays = [next(given) for _ in range(2 * len(step.outputs.arrays))]
        for variable in step.set_back:
            variable.assign(before[id(variable)])
        step.conclude(total.parts(flat, tf.reshape, tf.cast), others, slices, is_compiled=is_compiled)
        return step.results(numbers, arrays, *given)


def flatten(result: Result) -> list[Any]:
    total = result.total
    slices = [array for part in total.slices for array in (part.indices, part.values)]
    numbers = [array for number in result.scalars for array in number]
    arrays = [array for part in result.parts for array in part]
    return [*total.flats, *slices, *total.others, *numbers, *arrays, result.replicas, result.rows]


def _is_sparse(gradient: Any) -> bool:
    return has_rows(gradient, is_eager=False)


def say_lengths(why: str, do: str) -> str:
    return (
        f"{why}: its sparse gradients are taken for those of rows. A table of positions, looked up once for all rows,"
        f" would reach the optimizer once for each replica: {do}, or look it up with a matrix product"
    )


def is_seed(variable: Any) -> bool:
    """The state of a Keras SeedGenerator, in a function that was traced before."""
    return variable.dtype == tf.uint32 and variable.shape == [2] and "seed_generator_state" in variable.name


def _refuse_reads(graph: Any, watched: Watched) -> None:
    """After an update its variables have new values; here they get them at the end, so nobody may look before."""
    trained = {id(raw(variable).handle) for update in watched.updates for variable in update.variables}
    for operation, outside in walk(graph, since=watched.first_update_at):
        is_used = is_read(operation) or is_write(operation)
        if is_used and any(id(handle) in trained for handle in outside if handle is not None):
            raise NeedsMiddle(f"it uses weights after it has applied gradients ({operation.name})")
