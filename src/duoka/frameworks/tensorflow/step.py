"""What one traced or one eager step does: gradients, state, results; and what is done with those of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from duoka.collectives.packing import Kind, Packing
from duoka.frameworks.exchange.outcome import Total
from duoka.frameworks.keras.learning_rate import rate_of
from duoka.frameworks.tensorflow.compiled_update import apply_compiled
from duoka.frameworks.tensorflow.outputs import Outputs
from duoka.frameworks.tensorflow.recording import Update, slots_of
from duoka.frameworks.tensorflow.state import Trained
from duoka.frameworks.tensorflow.turns import Contents
from duoka.frameworks.tensorflow.values import EachReplica, LocalParts
from duoka.frameworks.tensorflow.variables import Merge, is_said_to_be_first, raw


class Step:
    def __init__(
        self,
        name: str,
        updates: Sequence[Update],
        written: Sequence[tuple[Any, Merge]],
        seeds: Sequence[Any],
        outputs: Outputs,
        is_sparse: Callable[[Any], bool],
        *,
        later: Sequence[Any] = (),
        is_updated: bool = False,
    ) -> None:
        """`later` are variables that were written to after the first update.

        With `is_updated`, optimizers have done their work already.
        """
        self._all_updates, self.outputs = list(updates), outputs
        self.updates = [] if is_updated else self._all_updates
        self.moving = [variable for variable, merge in written if merge is Merge.MEAN]
        self.sums = [variable for variable, merge in written if merge is Merge.SUM]
        self.counted = [variable for variable, merge in written if merge is Merge.COUNTED]
        seed_ids = {id(seed) for seed in seeds}
        first = [variable for variable, merge in written if merge is Merge.FIRST and id(variable) not in seed_ids]
        first.sort(key=is_said_to_be_first)
        self._late_ids = {id(variable) for variable in later}
        self.seeds = list(seeds)
        self.others = [*first, *self.seeds]
        self._present = [gradient for update in self.updates for gradient in update.gradients if gradient is not None]
        self._is_sparse = [is_sparse(gradient) for gradient in self._present]
        self.contents = Contents(
            name,
            bool(updates),
            bool(self.updates),
            tuple(self._is_sparse),
            len(self.moving),
            len(self.others),
            tuple(variable.name for variable in first if not is_said_to_be_first(variable)),
            len(self.sums),
            len(outputs.numbers),
            len(outputs.arrays),
        )

    @property
    def written(self) -> list[Any]:
        return [*self.moving, *self.others, *self.sums, *self.counted]

    @property
    def set_back(self) -> list[Any]:
        """To what they were before the step: sums are added to, and optimizers see what is written after them later."""
        late = [variable for variable in self.written if id(variable) in self._late_ids]
        return distinct([*self.sums, *self.counted, *late])

    @property
    def variables(self) -> list[Any]:
        """All that must be the same on all workers before the first step, each once."""
        return distinct([*trained_by(self._all_updates), *self.written])

    def tell_trained(self, trained: Trained) -> None:
        """What this step trains belongs to what must stay equal."""
        trained.see(self._all_updates, self.moving)

    def build_optimizers(self) -> bool:
        """Those of Keras that have no variables of their own yet; whether there were any."""
        is_any = False
        for update in self._all_updates:
            if isinstance(update.optimizer, BaseOptimizer) and update.variables and not update.optimizer.built:
                with tf.init_scope():
                    update.optimizer.build(list(update.variables))
                is_any = True
        return is_any

    @property
    def rate(self) -> Any:
        """The learning rate, where it is a number that a script may change; of several optimizers the sum."""
        optimizers = [update.optimizer for update in self._all_updates if isinstance(update.optimizer, BaseOptimizer)]
        rates = [rate for optimizer in optimizers if (rate := rate_of(optimizer)) is not None]
        return tf.add_n([tf.constant(0.0, tf.float64), *(tf.cast(rate.value, tf.float64) for rate in rates)])

    @property
    def gradients(self) -> list[Any]:
        """As tensors: slices are their indices and values."""
        tensors: list[Any] = []
        for gradient, sparse in zip(self._present, self._is_sparse, strict=True):
            if sparse:
                tensors += [tf.cast(gradient.indices, tf.int64), gradient.values]
            else:
                tensors.append(tf.convert_to_tensor(gradient))
        return tensors

    @property
    def num_gradient_arrays(self) -> int:
        return sum(2 if sparse else 1 for sparse in self._is_sparse)

    # What comes back.

    def total_of(self, num_replicas: int) -> Total:
        """Where everything lies in the flat arrays, before there are any."""
        dense = [self._kind(at) for at, sparse in enumerate(self._is_sparse) if not sparse]
        moving = [_kind(variable.dtype, variable.shape) for variable in self.moving]
        sums = [_kind(variable.dtype, variable.shape) for variable in self.sums]
        numbers = [_kind(number.dtype, [num_replicas]) for number in self.outputs.numbers]
        counts = len(dense), len(moving), 0, len(sums) + len(numbers)
        return Total(Packing([*dense, *moving, *sums, *numbers]), [], [], [], counts)

    def _kind(self, place: int) -> Kind:
        gradient, variable = self._present[place], self._trained[place]
        return _kind(gradient.dtype, variable.shape)

    @property
    def _trained(self) -> list[Any]:
        """The variables that gradients are of, without those that have none."""
        return [
            variable
            for update in self.updates
            for gradient, variable in zip(update.gradients, update.variables, strict=True)
            if gradient is not None
        ]

    @property
    def slices_like(self) -> list[tuple[list[Any], Any]]:
        """The shapes and types of indices and values that come back."""
        like: list[tuple[list[Any], Any]] = []
        for gradient, sparse in zip(self._present, self._is_sparse, strict=True):
            if sparse:
                like += [([None], "int64"), ([None, *gradient.values.shape[1:]], gradient.values.dtype.name)]
        return like

    def conclude(
        self, parts: Sequence[Sequence[Any]], others: Sequence[Any], slices: Sequence[Any], *, is_compiled: bool = False
    ) -> None:
        """Merge state and call optimizers, in the order in which the step did: an update sees a learning rate that
        was set before it, and not the next one, which is set after it.
        """
        self._merge(parts, others, is_late=False)
        self._update(parts[0], slices, apply_compiled if is_compiled else Update.apply)
        self._merge(parts, others, is_late=True)

    def _merge(self, parts: Sequence[Sequence[Any]], others: Sequence[Any], *, is_late: bool) -> None:
        """Give the state that the step has written to what all replicas have made of it."""
        _, moving, _, sums = parts
        for variable, value in [*zip(self.moving, moving, strict=True), *zip(self.others, others, strict=True)]:
            if (id(variable) in self._late_ids) == is_late:
                variable.assign(value)
        for variable, added in zip(self.sums, sums[: len(self.sums)], strict=True):
            if (id(variable) in self._late_ids) == is_late:
                variable.assign_add(added)

    def _update(
        self, dense: Sequence[Any], slices: Sequence[Any], apply: Callable[[Update, Sequence[Any]], None]
    ) -> None:
        """Call the optimizers, in the order in which the step has called them."""
        whole, pairs = iter(dense), iter(zip(slices[::2], slices[1::2], strict=True))
        together = []
        for variable, sparse in zip(self._trained, self._is_sparse, strict=True):
            if sparse:
                indices, values = next(pairs)
                together.append(tf.IndexedSlices(values, indices, tf.constant(list(variable.shape), tf.int64)))
            else:
                together.append(next(whole))
        given = iter(together)
        for update in self.updates:
            apply(update, [None if gradient is None else next(given) for gradient in update.gradients])

    def results(self, numbers: Sequence[Any], arrays: Sequence[Any], replicas: Any, rows: Any) -> Any:
        """Numbers come as three tensors each, arrays as two."""
        return self.outputs.rebuild(
            [EachReplica(*numbers[at : at + 3]) for at in range(0, len(numbers), 3)],
            [LocalParts(arrays[at], arrays[at + 1], replicas, rows) for at in range(0, len(arrays), 2)],
        )


def _kind(dtype: Any, shape: Any) -> Kind:
    return Kind(np.dtype(dtype.as_numpy_dtype), tuple(int(size) for size in shape))


def trained_by(updates: Sequence[Update]) -> list[Any]:
    """The variables that optimizers have or will have changed, their own included."""
    trained = [raw(variable) for update in updates for variable in update.variables]
    return distinct([*trained, *(slot for update in updates for slot in slots_of(update.optimizer))])


def distinct(variables: Sequence[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())
