"""What `run` has returned, over all replicas: reduced, gathered, or this worker's part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.collectives.survivors import add_up, gather
from duoka.collectives.transfer import pack_array, unpack_array
from duoka.collectives.values import decode, encode
from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.keras.host_tensorflow import TensorFlowHost
from duoka.frameworks.tensorflow.operations import read_op
from duoka.frameworks.tensorflow.order import Order
from duoka.frameworks.tensorflow.values import EachReplica, LocalParts, Rows, split_parts


class Results:
    def __init__(
        self,
        collective: Collective,
        host: TensorFlowHost,
        order: Order,
        step: Callable[[], int],
        tell_once: Callable[[str], None],
    ) -> None:
        self._collective, self._host, self._order = collective, host, order
        self._step, self._tell_once = step, tell_once

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
            self._tell_once(
                f"{call} after step {self._step()} goes without replica {', '.join(map(str, lost))}, lost with a worker"
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


def _refuse_text(value: LocalParts) -> None:
    if value.joined.dtype == tf.string:
        raise MismatchError(
            "Text that strategy.run has returned cannot be sent to other workers.",
            why="they exchange numbers.",
            do="return numbers, or read this worker's part with strategy.experimental_local_results.",
        )
