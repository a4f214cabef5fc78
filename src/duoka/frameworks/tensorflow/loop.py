"""TensorFlow loops of the user's own behind a strategy: run, reduce, gather, and the data."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.collectives.survivors import add_up, gather
from duoka.collectives.transfer import pack_array, unpack_array
from duoka.collectives.values import decode, encode
from duoka.data.position import Epochs
from duoka.data.shares import share
from duoka.devices.device import Device
from duoka.errors import MismatchError
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.exchange.memory import Memory
from duoka.frameworks.exchange.wire import Wire
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
from duoka.frameworks.tensorflow.operations import read_op
from duoka.frameworks.tensorflow.order import Order
from duoka.frameworks.tensorflow.replica import NeedsMiddle, get_replica_context, is_open
from duoka.frameworks.tensorflow.state import Trained
from duoka.frameworks.tensorflow.step_placement import log_step_placement
from duoka.frameworks.tensorflow.turns import Progress, Turns
from duoka.frameworks.tensorflow.values import EachReplica, LocalParts, Rows, is_each, split_parts
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
        return self._followed(check(dataset) if self._collective.num_replicas == 1 else distribute(dataset))

    def distribute_datasets_from_function(self, function: Callable[[Any], Any]) -> Any:
        context = InputContext(self._collective.num_replicas)
        dataset = function(context)
        is_alone = self._collective.num_replicas == 1
        return self._followed(check(dataset) if is_alone else distribute(from_function(dataset, context)))

    def _followed(self, dataset: Any) -> Any:
        """The same dataset; loops over it in Python know where they are."""
        if not tf.executing_eagerly() or not isinstance(dataset, tf.data.Dataset):
            return dataset
        return Distributed(dataset, self._course.add_source(), self._course)

    def first_batch_of(self, dataset: Any) -> int:
        return dataset.source.first if isinstance(dataset, Distributed) else 0

    # Results.

    def reduce(self, op: Any, value: Any, axis: int | None) -> Any:
        is_mean = read_op(op)
        return tf.nest.map_structure(lambda leaf: self._reduce(is_mean, leaf, axis), value)

    def _reduce(self, is_mean: bool, value: Any, axis: int | None) -> Any:
        if value is None:
            return None
        if isinstance(value, EachReplica):
            if axis is not None:
                raise MismatchError(
                    f"strategy.reduce(axis={axis}) was given a number from each replica, which has no axis.",
                    do="leave axis out.",
                )
            return value.mean if is_mean else value.total
        if isinstance(value, LocalParts):
            return self._reduce_parts(is_mean, value, axis)
        if isinstance(value, Rows):
            raise MismatchError(
                "strategy.reduce was given a batch.", do="compute with it in strategy.run; reduce what that returns."
            )
        if self._collective.num_replicas > 1 and not is_mean:
            raise MismatchError(
                f"strategy.reduce(sum) was given a plain {type(value).__name__}, not what strategy.run returned.",
                why="it is one value, the same for all replicas, and what its sum over replicas means is unclear.",
                do="return it from the step that is given to strategy.run.",
            )
        tensor = tf.convert_to_tensor(value)
        if axis is None:
            return tensor
        if tensor.dtype == tf.bool:
            tensor = tf.cast(tensor, tf.float32 if is_mean else tf.int32)
        return tf.reduce_mean(tensor, axis) if is_mean else tf.reduce_sum(tensor, axis)

    def _reduce_parts(self, is_mean: bool, value: LocalParts, axis: int | None) -> Any:
        """Each replica's part by itself, then over all in tree order: the bits do not depend on who has which."""
        _refuse_text(value)
        shape = list(value.joined.shape)
        if axis is not None:
            if not -len(shape) <= axis < len(shape):
                raise MismatchError(
                    f"strategy.reduce(axis={axis}) was given arrays of {len(shape)} dimensions.",
                    do="give an axis that they have, or leave it out.",
                )
            axis = axis if axis >= 0 else axis + len(shape)
            del shape[axis]
        elif shape:
            shape[0] = None
        joined = value.joined
        if joined.dtype == tf.bool:
            joined = tf.cast(joined, tf.float32 if is_mean else tf.int32)  # how many are true
        dtype = joined.dtype

        def reduce(joined: Array, lengths: Array, replicas: Array, rows: Array) -> Array:
            parts = self._of_local(np.split(joined, np.cumsum(lengths)[:-1]), replicas.tolist())
            return self._reduce_on_host(is_mean, parts, dict(zip(parts, rows.tolist(), strict=True)), axis)

        arguments = [joined, value.lengths, value.replicas, value.rows]
        with self._order.turn():
            (result,) = self._host.call(reduce, arguments, [(shape, dtype.name)])
        return result

    def _reduce_on_host(self, is_mean: bool, parts: dict[int, Array], rows: dict[int, int], axis: int | None) -> Array:
        """Without an axis, means are weighted by rows. Replicas without rows are left out."""
        dtype = next(iter(parts.values())).dtype
        wide = dtype if dtype.kind in "iufc" and dtype.itemsize >= 4 else np.dtype(np.float32)
        if axis is None:
            shape = self._common_shape(parts, rows)
            parts = {r: part if rows[r] else np.zeros(shape, dtype) for r, part in parts.items()}
            counts = {r: float(count) for r, count in rows.items()}
            parts = {r: part.astype(wide) * counts[r] if is_mean else part for r, part in parts.items()}
        else:
            counts = {r: float(part.shape[axis]) for r, part in parts.items()}
            parts = {r: part.sum(axis=axis, dtype=wide) for r, part in parts.items()}
        total = self._add_up(parts, counts if is_mean else None)
        return np.asarray(total).astype(dtype)

    def _add_up(self, parts: dict[int, Array], counts: dict[int, float] | None) -> Array:
        """Divided by the sum of counts, if there are any. What was lost with a worker is in neither of the two."""
        while True:
            total = add_up(self._collective, parts, dict.fromkeys(parts), is_mean=False)
            if counts is None:
                break
            ones = {replica: np.float64(count).reshape(1) for replica, count in counts.items()}
            divisor = add_up(self._collective, ones, dict.fromkeys(ones), is_mean=False)
            if divisor.lost == total.lost:
                break
        self._tell_lost("strategy.reduce", total.lost)
        return total.value if counts is None else total.value / divisor.value[0]

    def _common_shape(self, parts: dict[int, Array], rows: dict[int, int]) -> tuple[int, ...]:
        mine = {r: encode(list(part.shape) if rows[r] else None) for r, part in parts.items()}
        heard = [decode(data) for data in gather(self._collective, mine, "of shapes") if data is not None]
        shapes = {tuple(shape) for shape in heard if shape is not None}
        if len(shapes) > 1:
            raise MismatchError(
                f"strategy.reduce was given values of different shapes: {', '.join(map(str, sorted(shapes)))}.",
                why="replicas have different numbers of rows; without an axis their values are added up as they are.",
                do="give axis=0, or reduce to a number in the step.",
            )
        return shapes.pop()

    def _of_local(self, parts: Sequence[Array], replicas: list[int]) -> dict[int, Array]:
        """By replica; of those that this worker has inherited since it has none."""
        if not set(replicas) <= set(self._collective.replicas):
            raise MismatchError(
                "A worker was lost, and replicas have been dealt anew since these values were computed.",
                why="what strategy.run returned lies with the workers that have computed it.",
                do="reduce or gather it before the next strategy.run, or return numbers: they travel with the step.",
            )
        return dict(zip(replicas, parts, strict=True))

    def _tell_lost(self, call: str, lost: Sequence[int]) -> None:
        if lost:
            self.tell_once(
                f"{call} after step {self.step} goes without replica {', '.join(map(str, lost))}, lost with a worker"
                " that alone had computed it; numbers (tensors without dimensions) travel with the step"
            )

    def gather(self, value: Any, axis: int) -> Any:
        """Every replica's value, one behind the other along an axis, on every worker."""
        return tf.nest.map_structure(lambda leaf: self._gather(leaf, axis), value)

    def _gather(self, value: Any, axis: int) -> Any:
        if value is None:
            return value
        if self._collective.num_replicas == 1:
            is_number = tf.convert_to_tensor(value).shape.rank == 0
            return tf.reshape(value, [1]) if is_number else value  # one from each replica, as with several
        if isinstance(value, EachReplica):
            return value.values
        if not isinstance(value, LocalParts):
            raise MismatchError(
                f"strategy.gather was given a {type(value).__name__}.", do="give it what strategy.run has returned."
            )
        _refuse_text(value)

        def gather_parts(joined: Array, lengths: Array, replicas: Array) -> Array:
            parts = self._of_local(np.split(joined, np.cumsum(lengths)[:-1]), replicas.tolist())
            found = gather(self._collective, {r: pack_array(part) for r, part in parts.items()}, "of what ran")
            self._tell_lost("strategy.gather", [replica for replica, data in enumerate(found) if data is None])
            return np.concatenate([unpack_array(data) for data in found if data is not None], axis)

        shape = [None] * len(value.joined.shape)
        arguments = [value.joined, value.lengths, value.replicas]
        with self._order.turn():
            (result,) = self._host.call(gather_parts, arguments, [(shape, value.joined.dtype.name)])
        return result

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """This worker's replicas' values, each by itself."""
        leaves = tf.nest.flatten(value)
        parts = [self._split(leaf) for leaf in leaves]
        return tuple(tf.nest.pack_sequence_as(value, list(each)) for each in zip(*parts, strict=True))

    def _split(self, value: Any) -> list[Any]:
        replicas = self._collective.replicas
        if isinstance(value, EachReplica):
            return [value.values[replica] for replica in replicas]
        if isinstance(value, LocalParts):
            if not tf.executing_eagerly():
                return list(tf.split(value.joined, value.lengths, num=len(replicas)))
            return split_parts(value)
        if isinstance(value, Rows):
            num_rows = tf.shape(value.whole)[0] if value.whole.shape[0] is None else int(value.whole.shape[0])
            parts = [share(int(num_rows), self._collective.num_replicas, replica) for replica in replicas]
            return [value.whole[part.start : part.stop] for part in parts]
        return [value] * len(replicas)

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


def _refuse_text(value: LocalParts) -> None:
    if value.joined.dtype == tf.string:
        raise MismatchError(
            "Text that strategy.run has returned cannot be sent to other workers.",
            why="they exchange numbers.",
            do="return numbers, or read this worker's part with strategy.experimental_local_results.",
        )


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def make_loop(collective: Collective, strategy: Any, device: Device, options: Options) -> Loop:
    log = make_placement_log(collective, device, options)
    sync_batchnorm, check_every = options.sync_batchnorm, options.check_every
    return Loop(
        collective, strategy, log, sync_batchnorm=sync_batchnorm, check_every=check_every, borders=options.borders
    )
