"""Streams are read by every worker, or, when that takes a good part of a step, by one for all.

The reader is the worker that runs replica 0. It puts each global batch into shared memory, where the others find it;
they keep their own, unread streams. When the reader is lost, replica 0 moves, and with it the turn to read: the next
one reads forward to where the training is.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.trainers.epoch_iterator import EpochIterator

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.errors import MismatchError
from duoka.frameworks.exchange.agreement import hear_all
from duoka.frameworks.exchange.memory import Memory
from duoka.frameworks.keras.background import Background
from duoka.frameworks.keras.cost import Cost
from duoka.frameworks.keras.generators import AT_THE_START, digest, take_states_from_first
from duoka.frameworks.keras.message import Message, read_message
from duoka.frameworks.keras.source import Source
from duoka.frameworks.keras.stream import Stream
from duoka.strategies.turn import Turn

_DECIDE_AT, _NUM_MEASURED = 11, 8  # batches: steps are compiled with those before
_WORTH = 0.1  # of a step
_PATIENCE = 10  # a shuffle buffer is filled, or a lost reader made up for, in so many times the deadline of a step
_BATCH, _END, _APART = b"batch", b"end", b"apart"  # otherwise the number of bytes that room must be made for


class SharedReading:
    """The reading of one stream, in every `fit` that is given it: what some have not read is known in the next.

    All workers take the same number of batches, and so decide at the same one.
    """

    def __init__(
        self,
        collective: Collective,
        memory: Memory,
        source: Source,
        tell: Callable[[str], None],
        *,
        restarts: bool,
        prepare: Callable[[Any], Any] | None = None,
        is_led: Callable[[], bool] = lambda: False,
    ) -> None:
        """`restarts`: every run through it is the same whatever was read before. `prepare` is for tf.data datasets."""
        self._collective, self._memory, self._source, self._tell = collective, memory, source, tell
        self._prepare, self._is_led = prepare, is_led
        # A dataset of tf.data draws the seeds of shuffles when its iterator is made, which TensorFlow does at once.
        self._must_look = not (restarts and keras.backend.backend() == "tensorflow")
        self._num_taken, self._decide_at = 0, _DECIDE_AT
        self._is_decided = self._is_shared = False
        self._background = Background()
        self._cost = Cost(self._background)
        self._problem = ""  # why the last batch that was read cannot be shared
        self._at_hand: Any = None  # a batch that the reader has read and not handed out yet
        self._behind: deque[int] | None = None  # what this worker has not read of an iterator that outlives a `fit`
        self._takes_many = False  # batches at once

    @contextmanager
    def watching(self, x: Any) -> Iterator[None]:
        """Around `fit`: what Keras makes to read this stream takes its batches from here. The first one trains."""
        self._start_together()
        if hasattr(x, "__next__") and self._behind is None:
            self._behind = deque()
        make = EpochIterator.__init__

        def watched(iterator: Any, *args: Any, **kwargs: Any) -> None:
            make(iterator, *args, **kwargs)
            if kwargs.get("x") is x:
                EpochIterator.__init__ = make
                self._watch(iterator)

        EpochIterator.__init__ = watched
        try:
            yield
        finally:
            EpochIterator.__init__ = make
            self._cost.forget_stream()  # which holds on to what is read
        if self._is_shared:
            self._agree_on_generators("after fit")

    def _open(self, batches: Any) -> Stream:
        behind: deque[int] = deque() if self._behind is None else self._behind
        return Stream(batches, self.take, self._background.opening, behind)

    def _watch(self, iterator: Any) -> None:
        adapter, get = iterator.data_adapter, iterator._get_iterator
        if self._prepare is not None:
            adapter._dataset = self._prepare(adapter._dataset)
        self._takes_many = iterator.steps_per_execution > 1
        iterator._get_iterator = lambda: self._open(get())
        end_epoch = adapter.on_epoch_end

        def end_epoch_together() -> None:
            """Datasets shuffle themselves here, and validation may draw from the same generators."""
            if self._is_shared and not self._is_led():
                self._agree_on_generators("after a run through the data")
            end_epoch()

        adapter.on_epoch_end = end_epoch_together

    def _start_together(self) -> None:
        """A `fit` before may have ended with an error, for some workers at another batch than for others."""
        note = json.dumps(self.capture()).encode()
        answers = [json.loads(answer) for answer in hear_all(self._collective, note, "of what was read before")]
        self.restore(list(map(max, zip(*answers, strict=True))))
        self._at_hand = None

    def capture(self) -> list[int]:
        """What all workers know of it, for one that joins them: it has read all batches until then by itself."""
        return [self._num_taken, self._decide_at, int(self._is_decided), int(self._is_shared)]

    def restore(self, known: list[int]) -> None:
        self._num_taken, self._decide_at = known[:2]
        self._is_decided, self._is_shared = map(bool, known[2:])

    def take(self, stream: Stream) -> Any:
        """The next global batch, the same on all workers."""
        if self._is_led():  # to a saved batch: nothing is trained, so that nothing can be compared with a step
            return self._read(stream)
        is_measured = not self._is_decided and self._num_taken >= self._decide_at - _NUM_MEASURED
        if is_measured:
            self._cost.begin(stream)
            if self._num_taken == self._decide_at:
                self._decide()
        self._num_taken += 1
        if self._is_shared and len(self._collective.workers) > 1:
            return self._take_shared(stream)
        batch = self._read(stream)
        if is_measured:
            self._cost.end()
            if self._num_taken == self._decide_at:
                self._problem = _problem_with(batch)
        return batch

    # Whether.

    def _decide(self) -> None:
        """And again after twice as many: other sizes of batches are compiled for later."""
        note = json.dumps([self._cost.part_of_step(), self._problem[:1000]]).encode()
        answers = [json.loads(answer) for answer in hear_all(self._collective, note, "of what reading takes")]
        self._cost.clear()
        if max(part for part, _ in answers) <= _WORTH:
            self._decide_at *= 2
            return
        self._is_decided = True
        if problems := [problem for _, problem in answers if problem]:
            self._tell(f"reading takes a good part of a step, by every worker as before: {problems[0]}")
            return
        self._is_shared = True
        self._tell(f"worker {self._collective.placement.owner(0)} reads {self._source.name} for all from now on")

    # How.

    def _take_shared(self, stream: Stream) -> Any:
        if stream.is_new:
            self._begin_run(stream)
        word = self._hear_reader(stream)
        while word.isdigit():
            self._memory.make_room(int(word))
            word = self._hear_reader(stream)
        own, self._at_hand = self._at_hand, None
        if word == _END:
            raise StopIteration
        if word == _APART:
            self._is_shared = False
            self._tell("a batch came that cannot be shared: every worker reads from now on, behind what it has skipped")
            return stream.read() if own is None else own
        if own is not None:
            return own
        batch = read_message(self._place, self._tensor)
        stream.skip(batch)
        return batch

    def _begin_run(self, stream: Stream) -> None:
        self._agree_on_generators("before a run through the data")
        if not self._must_look or self._behind is not None:
            return
        firsts = hear_all(self._collective, str(stream.look()).encode(), "of the first batch of a run")
        if len(set(firsts)) > 1:
            self._tell(
                f"only the worker that reads {self._source.name} knows its order by now, since reading moves on what it"
                " draws from: should that worker be lost, the run ends"
            )

    def _hear_reader(self, stream: Stream) -> bytes:
        """The reader's word on the next batch. An error of the stream is raised there, and named on all others."""
        name = f"the reading of batch {self._num_taken} of {self._source.name}"
        turn = Turn(self._collective, name, _PATIENCE * self._collective.deadline_s)
        if turn.is_mine():
            with turn.acting():
                turn.word = self._offer(stream)
        return turn.word

    def _offer(self, stream: Stream) -> bytes:
        if self._at_hand is None:
            try:
                self._at_hand = self._read(stream)
            except StopIteration:
                return _END
        try:
            message = Message(self._at_hand)
        except MismatchError:
            return _APART
        if not self._memory.places or message.nbytes > len(self._place):
            return str(message.nbytes).encode()
        message.write(self._place)
        return _BATCH

    @property
    def _place(self) -> Array:
        """In turn: whoever is late still computes on the batch before, and frameworks use memory where it lies."""
        return self._memory.places[self._num_taken % 2]

    def _read(self, stream: Stream) -> Any:
        if num_skipped := stream.num_skipped:
            begin = time.perf_counter()
            batch = stream.read()
            self._tell(
                f"the worker that read for all was lost: worker {self._collective.worker} has read the {num_skipped}"
                f" batches that it had left to it, in {time.perf_counter() - begin:.1f} s, and reads on"
            )
            return batch
        return stream.read()

    def _agree_on_generators(self, when: str) -> None:
        """The reader's draws are those of one device. The others have not drawn what they have not read."""
        if len(set(hear_all(self._collective, digest(AT_THE_START), f"of generators {when}"))) > 1:
            take_states_from_first(self._collective, AT_THE_START)

    def _tensor(self, array: Array) -> Any:
        """As Keras reads it on this backend. PyTorch and TensorFlow copy it; JAX uses it where it lies."""
        if keras.backend.backend() == "jax":
            return array.copy() if self._takes_many else array
        return keras.ops.convert_to_tensor(array)


def _problem_with(batch: Any) -> str:
    try:
        Message(batch)
    except MismatchError as error:
        return error.what
    return ""
