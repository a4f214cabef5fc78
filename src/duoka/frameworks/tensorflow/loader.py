"""A dataset of global batches that knows where a loop is in it: which pass, and which batch of it comes next.

It is a tf.data.Dataset, and its iterators are TensorFlow's. In Python each batch that is handed out is counted; what a
graph draws by itself is not seen here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from duoka.data.ending import Ending
from duoka.data.position import Passes
from duoka.errors import MismatchError
from duoka.frameworks.keras import data
from duoka.frameworks.tensorflow.replica import is_open
from duoka.frameworks.tensorflow.values import Rows

# Each pass over these begins anew: from the passes before it needs nothing but that they began, since shuffling draws a
# seed for each pass, with its first batch at the latest. What others remember of earlier passes (a cache, the seeds of
# repetitions, a generator) is there again only when those are read again.
_BEGIN_ANEW = {
    "TensorSlice",
    "Tensor",
    "Range",
    "Batch",
    "ParallelBatch",
    "PaddedBatch",
    "Map",
    "ParallelMap",
    "Prefetch",
    "Shuffle",
    "Take",
    "Skip",
    "Shard",
    "Zip",
    "Filter",
    "Options",
    "Unbatch",
    "Rebatch",
    "TextLine",
    "TFRecord",
    "FixedLengthRecord",
    "InTurn",
}


class Hooks(Protocol):
    """What iterators tell about the loop."""

    def begin_loop(self, source: Source) -> bool:
        """A pass is about to begin. Returns whether it is within the body of no other one."""
        ...

    def begin_step(self, walk: Walk) -> None:
        """A batch is about to be handed out."""
        ...

    def gave(self, walk: Walk) -> None: ...

    def leave(self, walk: Walk) -> None:
        """A pass is over, or left."""
        ...

    def leave_out(self) -> None:
        """A pass was over in the run that is resumed."""
        ...

    def lose(self, why: str) -> None:
        """It is not known any more where the loop is."""
        ...


class Source:
    """The passes over one dataset."""

    def __init__(self) -> None:
        self.passes = Passes()
        self.draws: list[int] = []  # in each pass that is over: batches, and one more if its end was seen
        self.first = 0  # the number of the batch that the pass under way began with
        self.num_made = 0  # iterators, in this process
        self.trains = False  # weights were changed in a body of a loop over it
        self.num_rows: int | None = None  # of the first batch of a pass: the last one may have few
        self._digest = 0

    def begin(self) -> int | None:
        self.end(is_at_end=False)  # of one whose iterator somebody still holds
        first = self.passes.begin()
        self.first, self._digest, self.num_rows = first or 0, 0, None
        return first

    def see(self, batch: Any) -> None:
        """In its turn: what has been handed out of this pass, in a few bytes."""
        leaves = [leaf.whole if isinstance(leaf, Rows) else leaf for leaf in tf.nest.flatten(batch)]
        if self.num_rows is None:
            self.num_rows = max((int(leaf.shape[0]) for leaf in data.leaves_of(leaves)), default=0)
        self._digest = zlib.crc32(data.digest(leaves).to_bytes(4, "little"), self._digest)
        self.passes.order = f"{self._digest:08x}"

    def give(self, batch: Any) -> None:
        self.see(batch)
        self.passes.give()

    def end(self, *, is_at_end: bool) -> None:
        passes, batches, is_under_way = self.passes.where
        if is_under_way:
            self.draws = [*self.draws[:passes], batches + is_at_end]
            self.passes.end()

    def check_order(self) -> None:
        """After as many batches as were handed out before: they are the same ones."""
        expected = self.passes.expected_order()
        if expected not in ("", self.passes.order):
            raise MismatchError(
                f"Pass {self.passes.number + 1} over a dataset gives other batches than in the run that is resumed.",
                why=f"{self.first} batches have the fingerprint {self.passes.order}; it was {expected}.",
                do="use the data and the order of that run: shuffle with a seed, leave deterministic=False out, and"
                " draw in its functions with tf.random or stateless operations: not in Python, not by a layer or a"
                " generator, which go on from pass to pass. Or begin a new run.",
            )

    def capture(self) -> dict[str, Any]:
        return self.passes.capture() | {"draws": list(self.draws), "trains": self.trains}

    def resume(self, state: dict[str, Any]) -> None:
        self.passes.resume(state)
        self.draws, self.trains = list(state["draws"]), bool(state["trains"])


class Distributed(UnaryUnchangedStructureDataset):
    """Batches as they come from another dataset, and where the loop is in them."""

    def __init__(self, dataset: Any, source: Source, hooks: Hooks) -> None:
        self.source, self._hooks = source, hooks
        self._must_be_read = _remembers(dataset)
        super().__init__(dataset, dataset._variant_tensor)

    @property
    def batches_before(self) -> int:
        """Of the pass under way, handed out before this process came to it; strategy.progress counts on from them."""
        return self.source.first

    def __iter__(self) -> Iterator[Any]:
        if is_open() or not tf.executing_eagerly():
            graph_s: Iterator[Any] = super().__iter__()
            return graph_s
        is_outer = self._hooks.begin_loop(self.source)
        first = self.source.begin()
        for number in range(self.source.num_made, self.source.passes.number):
            self._read(OwnedIterator(self), number)
        walk = Walk(self, self.source, self._hooks, is_outer=is_outer, is_over=first is None)
        self.source.num_made = self.source.passes.number + 1
        if first is None:
            self._hooks.leave_out()
            self._read(walk, self.source.passes.number)
            self._hooks.leave(walk)
        else:
            walk.skip(first)
        return walk

    def _read(self, iterator: Any, number: int) -> None:
        """A pass that was over in the run that is resumed."""
        draws = self.source.draws[number] if number < len(self.source.draws) else 0
        for _ in range(draws if self._must_be_read else min(draws, 1)):
            try:
                OwnedIterator._next_internal(iterator)
            except tf.errors.OutOfRangeError:
                break


class Walk(Ending, OwnedIterator):
    """One pass."""

    def __init__(self, dataset: Any, source: Source, hooks: Hooks, *, is_outer: bool, is_over: bool) -> None:
        self.source, self.is_outer = source, is_outer
        self._hooks, self._number, self._is_over = hooks, source.passes.number, is_over
        super().__init__(dataset)

    def skip(self, num_batches: int) -> None:
        """They were handed out in the run that is resumed."""
        for position in range(num_batches):
            try:
                self.source.see(super()._next_internal())
            except tf.errors.OutOfRangeError:
                raise MismatchError(
                    f"Pass {self._number + 1} over a dataset has {position} batches; {num_batches} were trained on in"
                    " the run that is resumed.",
                    do="use the data of that run, or begin a new one.",
                ) from None
        if num_batches:
            self.source.check_order()

    def _next_internal(self) -> Any:
        if not tf.executing_eagerly():
            self._hooks.lose("an iterator of strategy.distribute_dataset is drawn from inside a tf.function")
            return super()._next_internal()
        if self._is_over:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        if self._number != self.source.passes.number:
            self._hooks.lose("two iterators over one dataset of strategy.distribute_dataset are drawn from in turns")
            return super()._next_internal()
        try:
            batch = super()._next_internal()
        except tf.errors.OutOfRangeError:
            self._close(is_at_end=True)
            raise
        self._hooks.begin_step(self)
        self.source.give(batch)
        self._hooks.gave(self)
        return batch

    def get_next_as_optional(self) -> Any:
        self._hooks.lose("an iterator of strategy.distribute_dataset is asked for optional batches")
        return super().get_next_as_optional()

    def __tf_tracing_type__(self, context: Any) -> Any:
        self._hooks.lose("an iterator of strategy.distribute_dataset is given to a tf.function")
        return super().__tf_tracing_type__(context)

    def _close(self, *, is_at_end: bool = False) -> None:
        if not self._is_over:
            self._is_over = True
            if self._number == self.source.passes.number:
                self.source.end(is_at_end=is_at_end)
            self._hooks.leave(self)

    def __del__(self) -> None:
        if "_is_over" in self.__dict__ and not self._is_ending():
            self._close()


def _remembers(dataset: Any) -> bool:
    """Whether a pass may depend on what was read in the passes before it."""
    kind = type(dataset).__name__.removeprefix("_").removesuffix("V2").removesuffix("Dataset")
    return kind not in _BEGIN_ANEW or any(map(_remembers, dataset._inputs()))
