"""Streams are read by every worker, or, when that takes a good part of a step and is asked for, by one for all.

The reader is the worker that runs replica 0. It puts each global batch into shared memory, where the others find it;
they keep their own, unread streams. When the reader is lost, replica 0 moves, and with it the turn to read: the next
one reads forward to where the training is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.trainers.epoch_iterator import EpochIterator

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.errors import MismatchError
from duoka.frameworks.keras.agreement import hear_all
from duoka.frameworks.keras.generators import AT_THE_START, digest, take_states_from_first
from duoka.frameworks.keras.memory import Memory
from duoka.frameworks.keras.message import Message, read_message
from duoka.frameworks.keras.source import Source
from duoka.frameworks.keras.stream import Stream
from duoka.strategies.turn import Turn

_FIRST, _LAST = 3, 11  # of the batches that are measured: steps are compiled with those before
_WORTH = 0.1  # of a step
_PATIENCE = 10  # a shuffle buffer is filled, or a lost reader made up for, in so many times the deadline of a step
_BATCH, _END, _APART = b"batch", b"end", b"apart"  # otherwise the number of bytes that room must be made for


class SharedReading:
    """The reading of one `fit`. All workers take the same number of batches, and so decide at the same one."""

    def __init__(
        self,
        collective: Collective,
        memory: Memory,
        source: Source,
        tell: Callable[[str], None],
    ) -> None:
        self._collective, self._memory, self._source, self._tell = collective, memory, source, tell
        self._num_taken = 0
        self._decide_at = _LAST  # and again after twice as many: other sizes of batches are compiled for later
        self._is_decided = self._is_shared = False
        self._last: tuple[Stream, float, float] | None = None  # when its batch was asked for, and how long that took
        self._reading_s = self._steps_s = 0.0
        self._problem = ""  # why the last batch that was read cannot be shared
        self._at_hand: Any = None  # a batch that the reader has read and not handed out yet

    @contextmanager
    def watching(self, x: Any) -> Iterator[None]:
        """Around `fit`: what Keras makes to read this stream takes its batches from here. The first one trains."""
        make = EpochIterator.__init__

        def watched(iterator: Any, *args: Any, **kwargs: Any) -> None:
            make(iterator, *args, **kwargs)
            if kwargs.get("x") is x:
                EpochIterator.__init__ = make
                get = iterator._get_iterator
                iterator._get_iterator = lambda: Stream(get(), self.take)

        EpochIterator.__init__ = watched
        try:
            yield
        finally:
            EpochIterator.__init__ = make
        if self._is_shared:
            self._agree_on_generators("after fit")

    def take(self, stream: Stream) -> Any:
        """The next global batch, the same on all workers."""
        begin = time.perf_counter()
        if not self._is_decided:
            self._measure(stream, begin)
            if self._num_taken == self._decide_at:
                self._decide()
        self._num_taken += 1
        if self._is_shared and len(self._collective.workers) > 1:
            return self._take_shared(stream)
        batch = self._read(stream)
        if not self._is_decided:
            self._last = stream, begin, time.perf_counter() - begin
            if self._num_taken == self._decide_at:
                self._problem = _problem_with(batch)
        return batch

    # Whether.

    def _measure(self, stream: Stream, now: float) -> None:
        """From one batch to the next. Between two runs through a dataset is more than a step."""
        if self._last is not None and self._num_taken > _FIRST and self._last[0] is stream:
            _, begin, reading_s = self._last
            self._reading_s += reading_s
            self._steps_s += now - begin

    def _decide(self) -> None:
        part = self._reading_s / self._steps_s if self._steps_s else 0.0
        note = json.dumps([part, self._problem[:1000]]).encode()
        answers = [json.loads(answer) for answer in hear_all(self._collective, note, "of what reading takes")]
        part = max(each for each, _ in answers)
        problems = [problem for _, problem in answers if problem]
        if part <= _WORTH:
            self._decide_at, self._reading_s, self._steps_s = 2 * self._decide_at, 0.0, 0.0
            return
        self._is_decided, self._last = True, None
        if problems:
            self._tell(f"reading takes {100 * part:.0f} % of a step, by every worker as before: {problems[0]}")
            return
        self._is_shared = True
        reader = self._collective.placement.owner(0)
        self._tell(f"reading takes {100 * part:.0f} % of a step: worker {reader} reads for all from now on")

    # How.

    def _take_shared(self, stream: Stream) -> Any:
        if stream.is_new:
            self._agree_on_generators("before a run through the data")
            stream.look()
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
        batch = read_message(self._place, _tensor)
        stream.skip(batch)
        return batch

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


def _problem_with(batch: Any) -> str:
    try:
        Message(batch)
    except MismatchError as error:
        return error.what
    return ""


def _tensor(array: Array) -> Any:
    """As Keras reads it on this backend. PyTorch copies it, and needs to: its `fit` takes several batches at once."""
    return array if keras.backend.backend() == "jax" else keras.ops.convert_to_tensor(array)
