"""Loops of the user's own, in the words of tf.distribute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from duoka.strategies.strategy import Loop, Options, Session


def as_it_is(function: Any) -> Any:
    """AutoGraph rewrites what a `tf.function` calls, unless it has this mark; here is nothing to rewrite."""
    function.autograph_info__ = {}
    return function


class Loops:
    """What a strategy offers to a TensorFlow loop: eager, or inside `tf.function`."""

    _session: Session
    _options: Options
    _loop_of_strategy: Loop | None = None

    @property
    def _loop(self) -> Loop:
        if self._loop_of_strategy is None:
            self._loop_of_strategy = self._session.loop(self, self._options)
        return self._loop_of_strategy

    @as_it_is
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """One step: `fn` once for each replica, on its rows of the batch among the arguments.

        What it hands to optimizers is added up over all replicas, weighted by rows, and applied once. Variables that it
        writes to are merged as their `aggregation` says. What it returns comes back as one value for each replica, for
        `reduce` and `gather`. TensorFlow's `options` say nothing here.
        """
        return self._loop.run(fn, args, kwargs)

    @as_it_is
    def experimental_run_v2(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(fn, args, kwargs)

    @as_it_is
    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """The sum or the mean over all replicas of what `run` has returned.

        The mean is weighted by rows: of means over rows it is the mean over the global batch. With an axis, each
        replica's rows are reduced, too.
        """
        return self._loop.reduce(reduce_op, value, axis)

    @as_it_is
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """This worker's replicas' values, as a tuple."""
        return self._loop.local_results(value)

    @as_it_is
    def distribute_dataset(self, dataset: Any) -> Any:
        """A tf.data.Dataset of global batches, for `run`: each replica takes its rows."""
        return self._loop.distribute_dataset(dataset)

    @as_it_is
    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        return self.distribute_dataset(dataset)

    @as_it_is
    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any = None) -> Any:
        """The same, from a function that is given a tf.distribute.InputContext and makes batches for one replica."""
        return self._loop.distribute_datasets_from_function(dataset_fn)

    @as_it_is
    def average_loss(self, per_example_loss: Any, global_batch_size: Any = None, *, sample_weight: Any = None) -> Any:
        """Inside `run`: one loss for each row, added up, by the true number of rows of the global batch."""
        return self._loop.average_loss(per_example_loss, sample_weight, global_batch_size)

    @as_it_is
    def compute_average_loss(
        self, per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> Any:
        """The same, with the arguments of `tf.nn.compute_average_loss`."""
        return self._loop.average_loss(per_example_loss, sample_weight, global_batch_size)
