"""TensorFlow loops of the user's own behind a strategy: run, reduce, gather, and the data."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from duoka.collectives.collective import Collective
from duoka.data.position import Epochs
from duoka.devices.device import Device
from duoka.errors import MismatchError
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.exchange.memory import Memory
from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.keras.draws import draw_in_turn
from duoka.frameworks.keras.host_tensorflow import TensorFlowHost
from duoka.frameworks.placement_log import PlacementLog, make_placement_log
from duoka.frameworks.start import agree_on_values
from duoka.frameworks.telling import Telling
from duoka.frameworks.tensorflow.batches import Arguments
from duoka.frameworks.tensorflow.course import Course
from duoka.frameworks.tensorflow.datasets import InputContext, check, distribute, from_function
from duoka.frameworks.tensorflow.eagerly import EagerRun
from duoka.frameworks.tensorflow.in_graph import GraphRun
from duoka.frameworks.tensorflow.loader import Distributed
from duoka.frameworks.tensorflow.losses import weigh_rows
from duoka.frameworks.tensorflow.middle import Middle, Reasons, refuse_more_replicas
from duoka.frameworks.tensorflow.one_replica import OneReplica
from duoka.frameworks.tensorflow.order import Order
from duoka.frameworks.tensorflow.replica import NeedsMiddle, get_replica_context, is_open
from duoka.frameworks.tensorflow.results import Results
from duoka.frameworks.tensorflow.state import Trained
from duoka.frameworks.tensorflow.step_placement import log_step_placement
from duoka.frameworks.tensorflow.turns import Progress, Turns
from duoka.frameworks.tensorflow.values import is_each
from duoka.frameworks.unseen import refuse_unseen
from duoka.strategies.borders import Borders
from duoka.strategies.strategy import Options


class Loop:
    def __init__(
        self,
        collective: Collective,
        strategy: Any,
        placement_log: PlacementLog | None,
        *,
        sync_batchnorm: bool,
        check_every: int | None = None,
        borders: Borders | None = None,
    ) -> None:
        self._collective, self._strategy, self._sync_batchnorm = collective, strategy, sync_batchnorm
        self._placement_log = placement_log
        self._watching = ExitStack()  # where the first step in a graph puts things
        self.tell_once = Telling(collective).tell_once
        self.progress = Progress()
        wire = self._wire = Wire(
            collective,
            why_lost="the step exchanges at each update, so that lost rows cannot be computed again.",
            do_when_lost="start again from the last checkpoint.",
        )
        self.checks = Checks(collective, check_every, self.tell_once)
        self._agreed: dict[int, Any] = {}  # variables that are known to be the same on all workers
        self._borders = borders or Borders()
        self._trained = Trained()
        self._course = Course(
            self._borders,
            self.progress,
            self.checks,
            self._agreed,
            self._end_step,
            self._compare,
            self._trained,
            collective.joining,
            self.tell_once,
            collective.num_replicas,
        )
        self._alone = OneReplica(strategy, lambda: self._borders.is_state_wanted, self._count_alone, self._watch_alone)
        self._turns = Turns(
            collective,
            Memory(collective, "loop"),
            wire,
            self.progress,
            self.tell_once,
            self._course.see_run,
            self._see_begin,
            self._course.see_training,
            self._see_end,
        )
        self._host = TensorFlowHost(wire)
        self._order = Order(self._host)
        self._results = Results(collective, self._host, self._order, lambda: self.step, self.tell_once)
        self._middle = Middle(wire, self._host)
        self._cannot_wait = Reasons()
        self._graphs: dict[Any, Any] = {}  # of tf.functions that were given to run

    @property
    def step(self) -> int:
        return self.progress.step + self._alone.steps_in_graphs

    @property
    def epochs(self) -> Epochs:
        return self._course.epochs

    # Running.

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        _check_call(function, args, kwargs)
        kwargs = kwargs or {}
        if self._collective.num_replicas == 1:
            return self._alone.run(function, args, kwargs)
        if is_open():
            raise MismatchError(
                "strategy.run was called inside strategy.run.", do="call the inner function directly in the step."
            )
        if self._sync_batchnorm:
            self.tell_once(
                "sync_batchnorm=True is for fit and for PyTorch, and strategy.run does not know it: BatchNorm takes the"
                " rows of each replica, unless its layer has synchronized=True"
            )
        plain = getattr(function, "python_function", None)
        if not tf.executing_eagerly():
            return self._run_in_graph(plain or function, args, kwargs, getattr(function, "_jit_compile", None))
        if plain is not None and not tf.config.functions_run_eagerly():
            self._wire.failure = None  # of a step before, which somebody has caught
            try:
                result = self._graph_of(function)(tuple(args), kwargs)
                self._watching.close()  # it has been executed
                return result
            except tf.errors.OpError:
                self._wire.raise_failure()  # as it was raised, not as TensorFlow wraps it
                raise
        return self._run_eagerly(plain or function, args, kwargs)

    def _graph_of(self, function: Any) -> Any:
        """A tf.function that is given to `run` outside of graphs: a graph of ours around the same Python."""
        if function not in self._graphs:

            def run(args: Any, kwargs: Any) -> Any:
                return self._run_in_graph(function.python_function, args, kwargs, function._jit_compile)

            run.autograph_info__ = {}  # type: ignore[attr-defined]  # as it is; the user's function is converted
            self._graphs[function] = tf.function(run, reduce_retracing=True)
        return self._graphs[function]

    def _run_in_graph(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], jit_compile: Any) -> Any:
        arguments = Arguments(args, kwargs, self.tell_once)
        converted = tf.__internal__.autograph.tf_convert(function, tf.__internal__.autograph.control_status_ctx())

        self._watch_graph(self._agreed.values)

        def run(middle: Middle | None) -> Any:
            told = self.tell_once, self._agree, self._trained
            graph = GraphRun(self._turns, self._host, self._order, self._strategy, *told, middle)
            return graph.run(converted, _name_of(function), arguments, jit_compile=jit_compile)

        return self._waiting(function, run)

    def _run_eagerly(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        arguments = Arguments(args, kwargs, self.tell_once)

        def run(middle: Middle | None) -> Any:
            eager = EagerRun(self._turns, self._strategy, self.tell_once, self._agree, self._trained, middle)
            with log_step_placement(self._placement_log, self._agreed.values):
                return eager.run(function, _name_of(function), arguments)

        return self._waiting(function, run)

    def _watch_graph(self, variables: Callable[[], Iterable[Any]]) -> None:
        """It is executed later, by whoever has called the graph: the table comes before the next step, or at last."""
        if self._placement_log is not None and self._placement_log.is_wanted:
            atexit.register(self._watching.close)
            self._watching.enter_context(log_step_placement(self._placement_log, variables))

    def _watch_alone(self, variables: Callable[[], Iterable[Any]]) -> ExitStack:
        stack = ExitStack()
        if tf.executing_eagerly():
            stack.enter_context(log_step_placement(self._placement_log, variables))
        else:
            self._watch_graph(variables)
        return stack

    def _end_step(self) -> None:
        self._turns.end()
        if self._collective.num_replicas == 1:
            self._watching.close()

    def _count_alone(self) -> None:
        self._course.see_training()
        self.progress.step += 1

    def _compare(self) -> None:
        if self.progress.step and self._collective.num_replicas > 1:  # at step 0 nothing is known to be trained yet
            self._see_begin()

    def _see_begin(self) -> None:
        self.checks.at_some_border(self.progress.step, self._trained.state)

    def _see_end(self) -> None:
        self._watching.close()

    def _waiting(self, function: Callable[..., Any], run: Callable[[Middle | None], Any]) -> Any:
        """With updates at the end of the step, unless it shows that they cannot wait."""
        reason = self._cannot_wait.of(function)
        if reason is None:
            try:
                return run(None)
            except NeedsMiddle as need:
                reason = str(need)
                self._cannot_wait.keep(function, reason)
        name = _name_of(function)
        refuse_more_replicas(name, reason, self._collective.num_replicas, len(self._collective.workers))
        self.tell_once(f"{name} exchanges at each update, because {reason}: a worker that is lost ends the run")
        return run(self._middle)

    def _agree(self, variables: Sequence[Any]) -> bool:
        """On the values of variables that were not seen before. True where this worker had other ones."""
        new = [variable for variable in variables if id(variable) not in self._agreed]
        self._agreed.update({id(variable): variable for variable in new})
        if not new:
            return False
        lines = [f"{variable.name}: {tuple(variable.shape)} {variable.dtype.name}" for variable in new]
        values = [np.array(variable) for variable in new]
        others = agree_on_values(lines, values, self._collective, "before they are trained")
        for place, value in others.items():
            new[place].assign(value)
        return bool(others)

    # Losses.

    def average_loss(self, per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
        if self._collective.num_replicas > 1:
            return get_replica_context().losses.average(per_example_loss, sample_weight, global_batch_size)
        losses = weigh_rows(per_example_loss, sample_weight)
        size = tf.shape(losses)[0] if global_batch_size is None else global_batch_size
        return tf.reduce_sum(losses) / tf.cast(size, losses.dtype)

    @property
    def is_running(self) -> bool:
        return is_open()

    def weigh(self, loss: Any, count: Any) -> Any:
        return loss if self._collective.num_replicas == 1 else get_replica_context().weigh(loss, count)

    # Data.

    def distribute_dataset(self, dataset: Any) -> Any:
        settled = draw_in_turn(dataset, self.tell_once)
        return self._followed(check(settled) if self._collective.num_replicas == 1 else distribute(settled))

    def distribute_datasets_from_function(self, function: Callable[[Any], Any]) -> Any:
        context = InputContext(self._collective.num_replicas)
        dataset = draw_in_turn(function(context), self.tell_once)
        is_alone = self._collective.num_replicas == 1
        return self._followed(check(dataset) if is_alone else distribute(from_function(dataset, context)))

    def _followed(self, dataset: Any) -> Any:
        """The same dataset; loops over it in Python know where they are."""
        if not tf.executing_eagerly() or not isinstance(dataset, tf.data.Dataset):
            return dataset
        return Distributed(dataset, self._course.add_source(), self._course)

    # Results.

    def reduce(self, op: Any, value: Any, axis: int | None) -> Any:
        return self._results.reduce(op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        return self._results.gather(value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        return self._results.local_results(value)

    def note_division(self) -> None:
        if is_open():
            self.tell_once(
                "a step asks for num_replicas_in_sync: a loss must not be divided by it here, since each replica's"
                " gradient is weighted by its part of the rows already"
            )

    def owns(self, value: Any) -> bool:
        return any(is_each(leaf) for leaf in tf.nest.flatten(value))


def _check_call(function: Any, args: Any, kwargs: Any) -> None:
    if not callable(function):
        raise MismatchError(
            f"strategy.run was given a {type(function).__name__} to run.",
            do="give it a function: run(step, args=(batch,)).",
        )
    if not isinstance(args, (tuple, list)):
        raise MismatchError(
            f"strategy.run was given a {type(args).__name__} as args.", do="give a tuple: run(step, args=(batch,))."
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise MismatchError(f"strategy.run was given a {type(kwargs).__name__} as kwargs.", do="give a dictionary.")


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def make_loop(collective: Collective, strategy: Any, device: Device, options: Options) -> Loop:
    refuse_unseen("tensorflow", device)
    log = make_placement_log(collective, device, options)
    sync_batchnorm, check_every = options.sync_batchnorm, options.check_every
    return Loop(
        collective, strategy, log, sync_batchnorm=sync_batchnorm, check_every=check_every, borders=options.borders
    )
