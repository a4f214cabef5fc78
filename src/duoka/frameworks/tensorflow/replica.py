"""One replica's run of the user's step: watched, so that what it does to variables waits for all replicas."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from duoka.errors import MismatchError
from duoka.frameworks.replacing import replacing_body
from duoka.frameworks.tensorflow.graphs import graph_here, is_in_function_of
from duoka.frameworks.tensorflow.iterators import refusing_iterators
from duoka.frameworks.tensorflow.losses import Losses
from duoka.frameworks.tensorflow.middle import Middle
from duoka.frameworks.tensorflow.operations import read_op
from duoka.frameworks.tensorflow.randomness import watching_generators
from duoka.frameworks.tensorflow.recording import Update, slots_of, watching_updates
from duoka.frameworks.tensorflow.variables import raw

_open: list[ReplicaContext] = []  # the step under way, in this process


class NeedsMiddle(BaseException):
    """What a step does that cannot wait for its end. Nobody but us catches it."""


class ReplicaContext:
    """What a step can ask for while it runs: `duoka.tensorflow.get_replica_context()`."""

    def __init__(self, strategy: Any, replica: Any, losses: Losses, middle: Middle | None) -> None:
        self.strategy, self.losses = strategy, losses
        self.replica_id_in_sync_group = replica
        self._middle = middle

    @property
    def num_replicas_in_sync(self) -> int:
        return int(self.strategy.num_replicas_in_sync)

    @property
    def replica_id(self) -> Any:
        return self.replica_id_in_sync_group

    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """Over all replicas, in the middle of a step: with one replica on each worker."""
        is_mean = read_op(reduce_op)
        if self.strategy.replicas == 1:
            return value
        if is_mean:
            _refuse_integers(value)
        if self._middle is None:
            raise NeedsMiddle("it calls all_reduce")
        middle = self._middle
        return tf.nest.map_structure(lambda leaf: middle.all_reduce(is_mean, leaf), value)

    def weigh(self, loss: Any, count: Any) -> Any:
        """A mean over `count` things that are no rows, or, without a count, a sum: its gradient counts as such."""
        if count is None:
            return self.losses.weigh(loss, 1.0)
        if self._middle is None:
            raise NeedsMiddle("it calls strategy.weigh, and the counts of all replicas are added up first")
        own = tf.stop_gradient(tf.cast(count, tf.float64))
        return self.losses.weigh(loss, tf.math.divide_no_nan(own, self._middle.all_reduce(False, own)))


def _refuse_integers(value: Any) -> None:
    for leaf in tf.nest.flatten(value):
        dtype = tf.convert_to_tensor(leaf).dtype
        if dtype.is_integer or dtype.is_bool:
            raise MismatchError(
                f"all_reduce(mean) was given {dtype.name}.",
                why="the mean is weighted by rows, and need not be a whole number.",
                do="cast it first: tf.cast(value, tf.float32).",
            )


def get_replica_context() -> ReplicaContext:
    """Inside `strategy.run`: the replica that runs, and what it can ask for."""
    if not _open:
        raise MismatchError(
            "There is no replica here.", why="a replica context exists inside strategy.run.", do="call it in the step."
        )
    return _open[-1]


@contextmanager
def entered(context: ReplicaContext) -> Iterator[None]:
    _open.append(context)
    try:
        yield
    finally:
        _open.pop()


def is_open() -> bool:
    return bool(_open)


def _is_asked_by_tensorflow() -> bool:
    """Its own code (generators, moving averages) goes on with its own context. Autograph calls for the user."""
    module = str(sys._getframe(3).f_globals.get("__name__"))  # who has called the function that calls the one above
    return module.startswith("tensorflow.") and not module.startswith("tensorflow.python.autograph.")


class Watched:
    """The calls of optimizers and the generators of one run, or one tracing, of a step.

    Updates are held back; or, with `exchange`, done where they stand, with the gradients that it gives.
    """

    def __init__(self, exchange: Callable[[Sequence[Any]], list[Any]] | None = None) -> None:
        self._exchange = exchange
        self.is_updating = False
        self.updates: list[Update] = []
        self.generators: dict[int, Any] = {}
        self.first_update_at = 0  # how many operations the graph had
        self._reads: Any = None  # outside of graphs: a tape, which knows what is read after the first update

    @property
    def counted_ids(self) -> set[int]:
        """Variables that optimizers count their updates in, when those are held back."""
        held_back = self.updates if self._exchange is None else []
        return {id(raw(update.global_step)) for update in held_back if update.global_step is not None}

    @contextmanager
    def watching(
        self, context: ReplicaContext, see_generator: Callable[[Any], None] = lambda state: None
    ) -> Iterator[None]:
        def see(state: Any) -> None:
            self.generators[id(state)] = state
            see_generator(state)

        self.updates.clear()  # TensorFlow may trace a step twice
        self._graph = graph_here()
        with ExitStack() as stack:
            self._stack = stack
            stack.enter_context(context.losses.patched())
            stack.enter_context(watching_generators(see))
            stack.enter_context(watching_updates(self._update))
            stack.enter_context(refusing_iterators())
            stack.enter_context(self._entered(context))
            yield

    def _note_first_update(self) -> None:
        if tf.executing_eagerly():
            self._reads = self._stack.enter_context(tf.GradientTape())
        else:
            self.first_update_at = len(tf.compat.v1.get_default_graph().get_operations())

    def refuse_two_writes(self, earlier: Collection[Any], later: Collection[Any]) -> None:
        """What an update looks at can have been written before it, or be written after it.

        Of a variable that is, only the last value is exchanged.
        """
        late_ids = {id(variable) for variable in later}
        own = {id(variable) for update in self.updates for variable in slots_of(update.optimizer)}
        for variable in earlier:
            if id(variable) in late_ids and id(variable) in own:
                raise NeedsMiddle(f"it writes to {variable.name} both before and after it applies gradients")

    def refuse_reads(self) -> None:
        """After an update its variables have new values; here they get them at the end, so nobody may look before.

        For a step that ran outside of graphs.
        """
        if self._reads is not None:
            trained = {id(raw(variable)) for update in self.updates for variable in update.variables}
            if any(id(variable) in trained for variable in self._reads.watched_variables()):
                raise NeedsMiddle("it uses weights after it has applied gradients")

    @contextmanager
    def _entered(self, context: ReplicaContext) -> Iterator[None]:
        """For the step, by whatever name it asks TensorFlow for its context: scripts bind the function when they import
        it. Keras's optimizers have sums of their own to ask TensorFlow's context for.
        """

        def make(former: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: former() if self.is_updating or _is_asked_by_tensorflow() else context

        with replacing_body(tf.distribute.get_replica_context, make), entered(context):
            yield

    def _update(self, update: Update, apply: Callable[[Sequence[Any]], Any]) -> Any:
        if is_in_function_of(self._graph):
            raise MismatchError(
                "The step calls a tf.function that calls an optimizer.",
                why="what replicas hand to optimizers is exchanged between them, and TensorFlow keeps such a function"
                " as it was traced.",
                do="give the tf.function itself to strategy.run, or leave @tf.function away from it.",
            )
        if self._exchange is None:
            if graph_here() is not self._graph:
                raise NeedsMiddle("it applies gradients in a branch or a loop of a graph")
            if not self.updates:
                self._note_first_update()
        self.updates.append(update)
        if self._exchange is None:
            if update.global_step is not None:
                update.global_step.assign_add(1)  # for the rest of the step; the update will count it for good
            return None
        self.is_updating = True
        try:
            return apply(self._exchange(update.gradients))
        finally:
            self.is_updating = False
