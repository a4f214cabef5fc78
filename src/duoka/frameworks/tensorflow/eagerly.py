"""`run` outside of graphs: the step's own Python runs once for each replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from duoka.collectives.arrays import Array
from duoka.frameworks.keras import data
from duoka.frameworks.keras.tensorflow_rows import has_rows
from duoka.frameworks.tensorflow.batches import Arguments
from duoka.frameworks.tensorflow.in_graph import flatten, is_seed, say_lengths
from duoka.frameworks.tensorflow.losses import Losses
from duoka.frameworks.tensorflow.middle import Middle
from duoka.frameworks.tensorflow.outputs import Outputs
from duoka.frameworks.tensorflow.randomness import say_random, state_of_replica, watching_random_operations
from duoka.frameworks.tensorflow.replica import NeedsMiddle, ReplicaContext, Watched
from duoka.frameworks.tensorflow.state import Trained
from duoka.frameworks.tensorflow.step import Step, distinct, trained_by
from duoka.frameworks.tensorflow.turns import NOBODY, Turns
from duoka.frameworks.tensorflow.variables import (
    Merge,
    is_doubtful_sum,
    merge_of,
    say_reset,
    say_summed,
    say_written,
    watching_resets,
    watching_writes,
)


class EagerRun:
    """One call of `run`."""

    def __init__(
        self,
        turns: Turns,
        strategy: Any,
        tell: Callable[[str], None],
        agree: Callable[[Sequence[Any]], bool],
        trained: Trained,
        middle: Middle | None,
    ) -> None:
        self._turns, self._strategy, self._tell, self._agree, self._middle = turns, strategy, tell, agree, middle
        self._trained = trained
        self._known: list[Any] = []  # variables that the first replica has read
        self._before: dict[int, tuple[Any, Any]] = {}  # variables that were written to, and their values
        self._seeds: dict[int, Any] = {}

    def run(self, function: Callable[..., Any], name: str, arguments: Arguments) -> Any:
        total_rows = int(arguments.count_rows(self._strategy.replicas))
        position, factors = self._turns.begin(total_rows, data.digest(arguments.rows))
        step = None
        has_agreed = False
        while position[0] != NOBODY:
            step = self._compute(function, name, arguments, position, factors)
            if not has_agreed:
                has_agreed = True  # after the first replica, of which every worker has one
                if self._agree(distinct([*step.variables, *self._known])) and self._middle is None:
                    continue  # they were different here: once more
            replica, left = int(position[0]), self._leave(step)
            position, factors = self._turns.deposit(replica, step.contents, left, float(step.rate))
        assert step is not None
        step.tell_trained(self._trained)
        return self._finish(step)

    def _compute(
        self, function: Callable[..., Any], name: str, arguments: Arguments, position: Array, factors: Array
    ) -> Step:
        replica, start, stop = (int(number) for number in position)
        watched, touched = Watched(self._middle.exchange if self._middle else None), dict[int, Any]()
        earlier, later = dict[int, Any](), dict[int, Any]()  # written to before the first update, and after it
        losses = Losses(*map(float, factors))
        context = ReplicaContext(self._strategy, tf.constant(replica, tf.int32), losses, self._middle)

        def see(variable: Any) -> None:
            if watched.is_updating or not tf.executing_eagerly():
                return  # a graph in the step is looked at when it is called
            (later if watched.updates else earlier)[id(variable)] = variable
            if id(variable) in touched:
                return
            touched[id(variable)] = variable
            if id(variable) not in self._before:
                self._before[id(variable)] = variable, tf.identity(variable)
            if is_seed(variable):
                self._seeds[id(variable)] = variable  # drawn from in a graph
            if id(variable) in self._seeds:
                variable.assign(state_of_replica(self._before[id(variable)][1].numpy(), replica))

        def see_sum(variable: Any) -> None:
            if not watched.is_updating and tf.executing_eagerly() and is_doubtful_sum(variable):
                self._tell(say_summed(variable, name))

        def see_reset(variable: Any) -> None:
            if tf.executing_eagerly() and merge_of(variable) is Merge.SUM:
                self._tell(say_reset(variable, name))

        def see_generator(state: Any) -> None:
            self._seeds[id(state)] = state
            see(state)

        args, kwargs = arguments.with_rows([leaf[start:stop] for leaf in arguments.rows])

        def see_random() -> None:
            if tf.executing_eagerly():
                self._tell(say_random(name))

        try:
            with (
                watching_writes(see, see_sum, see_generator),
                watching_resets(see_reset),
                watching_random_operations(see_random),
                watched.watching(context, see_generator),
            ):
                outputs = Outputs(self._call(function, args, kwargs))
            try:
                watched.refuse_reads()
                if self._middle is None:
                    watched.refuse_two_writes(earlier.values(), later.values())
            except NeedsMiddle:
                self._agree(distinct([*self._known, *trained_by(watched.updates)]))
                raise
            counted = watched.counted_ids
            pairs = [
                (variable, merge_of(variable, is_seed=key in self._seeds, is_counted=key in counted))
                for key, variable in touched.items()
            ]
            for variable, merge in pairs:
                if merge is Merge.MEAN and variable.trainable:
                    self._tell(say_written(variable, name))
            seeds = [variable for key, variable in touched.items() if key in self._seeds]
            late = list(later.values())
            is_updated = self._middle is not None
            step = Step(name, watched.updates, pairs, seeds, outputs, _is_sparse, later=late, is_updated=is_updated)
            if step.slices_like:
                self._tell(say_lengths(f"{name} runs outside of graphs", "make it a tf.function"))
            self._after = {key: np.array(variable) for key, variable in touched.items()}
        finally:
            for key in touched:
                variable, before = self._before[key]
                variable.assign(before)
        return step

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The first replica's run shows which weights there are. They are agreed on also when it cannot be used."""
        if self._known:
            return function(*args, **kwargs)
        tape = tf.GradientTape()
        try:
            with tape:
                return function(*args, **kwargs)
        except NeedsMiddle:
            self._agree(tape.watched_variables())
            raise
        finally:
            self._known = list(tape.watched_variables())

    def _leave(self, step: Step) -> list[Array]:
        """What this replica's step has left, as arrays."""
        state = [self._after[id(variable)] for variable in [*step.moving, *step.others]]
        sums = [self._after[id(variable)] - self._before[id(variable)][1].numpy() for variable in step.sums]
        results = [*step.outputs.numbers, *step.outputs.arrays]
        return [*map(_array, step.gradients), *state, *sums, *map(_array, results)]

    def _finish(self, step: Step) -> Any:
        result = self._turns.finish()
        flat = [tf.convert_to_tensor(array) for array in flatten(result)]
        total = result.total
        slices = flat[len(total.flats) : len(total.flats) + 2 * len(total.slices)]
        others = flat[len(total.flats) + len(slices) :][: len(total.others)]
        *rest, replicas, rows = flat[len(total.flats) + len(slices) + len(others) :]
        step.conclude(total.parts(flat[: len(total.flats)], tf.reshape, tf.cast), others, slices)
        num_numbers = 3 * len(result.scalars)
        return step.results(rest[:num_numbers], rest[num_numbers:], replicas, rows)


def _is_sparse(gradient: Any) -> bool:
    return has_rows(gradient, is_eager=True)


def _array(tensor: Any) -> Array:
    return np.asarray(tensor)
