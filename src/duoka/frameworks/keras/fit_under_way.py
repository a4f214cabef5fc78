"""One `fit`, as Keras runs it: which epoch, which batch; and its callbacks, which are silent where it is led."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keras import callbacks as kinds

from duoka.frameworks.keras.callback_state import CallbackStates, refuse_backups
from duoka.frameworks.keras.capture import capture_generators, restore_generators
from duoka.frameworks.keras.shared_reading import SharedReading
from duoka.frameworks.replacing import replacing

_SILENT = ("on_train_end", "on_test_begin", "on_test_batch_begin", "on_test_batch_end", "on_test_end")
_WATCHED = ("on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end")
Record = dict[str, Any]


class Calls:
    """Of train functions, since the beginning of a run, whether it was this process that made them or not."""

    def __init__(self) -> None:
        self.count = 0


class FitUnderWay:
    def __init__(
        self,
        model: Any,
        calls: Calls,
        kept: tuple[Record | None, Record | None],
        is_main: Callable[[], bool],
        *,
        num_epochs: int,
        is_stream: bool,
        can_leap: bool,
        reading: SharedReading | None = None,
        is_scout: bool = False,
        see_end: Callable[[], None] = lambda: None,
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        """`kept` is what a saved state knows of it: one that is over, or the one to go on with.

        A scout takes one batch, to build the model, and ends: by then it is known how to go on. `see_end` is called
        when the last epoch is over, before anything is done about the end. `go_on` is called where one that was over
        when it was saved is about to begin another epoch.
        """
        self._num_epochs, self._see_end, self._go_on = num_epochs, see_end, go_on
        self._reading = reading
        self.model, self.first_call, self._calls = model, calls.count, calls
        self.record, self._next = kept
        self._is_main, self._is_stream, self._can_leap = is_main, is_stream, can_leap
        self.epoch = self.batch = 0
        self._is_cut = False  # in the middle of an epoch, by a callback that has stopped it
        self._is_stopped = False  # by a callback
        self._epoch_call, self._epoch_generators = calls.count, capture_generators()
        self.is_scout = is_scout
        self.is_silent = is_scout or self.record is not None or self._next is not None
        self.trained = 0  # calls since workers have compared their weights
        self._list: Any = None
        self._states: CallbackStates | None = None

    @property
    def reads_nothing(self) -> bool:
        """It is over, and what it read leaves no trace: the first batch builds the model, and that is all."""
        return self.is_scout or (self.record is not None and not self._is_stream)

    # Callbacks.

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around Keras's `fit`, which makes a list of callbacks, or takes the user's."""
        begin = kinds.CallbackList.on_train_begin

        def on_train_begin(callbacks: Any, logs: Any = None) -> None:
            if self._list is None:
                self._begin(callbacks, lambda: begin(callbacks, logs))
            else:
                begin(callbacks, logs)

        former_epoch = self.model._initial_epoch
        with replacing([(kinds.CallbackList, "on_train_begin", on_train_begin)]):
            try:
                yield
            finally:
                self.model._initial_epoch = former_epoch
                if self._list is not None:
                    for name in (*_SILENT, *_WATCHED):
                        vars(self._list).pop(name, None)

    def _begin(self, callbacks: Any, begin: Callable[[], None]) -> None:
        self._list, self._states = callbacks, CallbackStates(callbacks.callbacks)
        if self.is_silent:
            refuse_backups(callbacks.callbacks)
        if self.record is None and not self.is_scout:
            saved = [] if self._next is None else self._next["callbacks"]
            with self._states.going_on(saved, self._is_main()):
                begin()
            self._states.begin()
        self._watch(callbacks)
        if self._next is not None:
            self._leap()

    def _leap(self) -> None:
        """Epochs that are over need not be read again where nothing is kept between them but the generators' state.

        One that goes on with a new epoch reads the last one: its model has all its variables then, on every backend.
        """
        assert self._next is not None
        first = self._next["epoch"] - self._is_between(self._next["epoch"])
        if first and self._can_leap and not self._is_stream:
            self.model._initial_epoch = first
            self._calls.count = self._next["epoch_call"]

    def _is_between(self, epoch: int) -> bool:
        """Whether it was saved at its end, and goes on with this epoch."""
        return self._next is not None and self._next["is_between"] and self._next["epoch"] == epoch

    def _watch(self, callbacks: Any) -> None:
        attributes, own = vars(callbacks), type(callbacks)
        for name in _SILENT:
            attributes[name] = self._if_heard(getattr(own, name).__get__(callbacks))

        def on_epoch_begin(epoch: int, logs: Any = None) -> None:
            self.epoch, self.batch = epoch, 0
            if self.is_silent and self._is_between(epoch):
                self._go_on()
            if not self.is_silent:
                own.on_epoch_begin(callbacks, epoch, logs)
            elif self._next is not None and epoch == self._next["epoch"]:
                restore_generators(self._next["epoch_generators"])
            self._epoch_call, self._epoch_generators = self._calls.count, capture_generators()

        def on_train_batch_begin(batch: int, logs: Any = None) -> None:
            self.batch = batch
            if not self.is_silent:
                own.on_train_batch_begin(callbacks, batch, logs)

        def on_train_batch_end(batch: int, logs: Any = None) -> None:
            if not self.is_silent:
                own.on_train_batch_end(callbacks, batch, logs)
            self._is_cut = self.model.stop_training

        def on_epoch_end(epoch: int, logs: Any = None) -> None:
            if not self.is_silent:
                own.on_epoch_end(callbacks, epoch, logs)
                self._is_stopped = bool(self.model.stop_training)
                if epoch + 1 == self._num_epochs and not self._is_stopped:
                    self._see_end()
            elif self._has_read_all():
                self.model.stop_training = True

        watched = (on_epoch_begin, on_train_batch_begin, on_train_batch_end, on_epoch_end)
        attributes.update(zip(_WATCHED, watched, strict=True))

    def _if_heard(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return None if self.is_silent else method(*args, **kwargs)

        return run

    # On the way to a saved batch, and from there.

    def head_for(self, saved: Record) -> None:
        """The others have gone on since this worker heard where they are."""
        self._next = saved

    def leave_out(self) -> None:
        """A batch was read and not trained on. What is over already is left where it ended.

        At the end of an epoch, in most cases: streams shuffle themselves anew there, and begin the next run.
        """
        if self.reads_nothing or (self._has_read_all() and self.record is not None and self.record.get("is_cut")):
            self.model.stop_training = True

    def _has_read_all(self) -> bool:
        """Of one that is over."""
        return self.record is not None and self._calls.count - self.first_call >= self.record["num_calls"]

    def arrive(self, saved: Record, *, has_joined: bool) -> None:
        """The next batch is the first one of this process; of others in this run, if it `has_joined` them."""
        self.is_silent = False
        self.trained = saved["trained"] if has_joined else 0
        if has_joined and self._reading is not None:
            self._reading.restore(saved["reading"])
        if self._states is not None:
            self._states.restore(saved["callbacks"], is_main=self._is_main())
        if not saved["is_between"]:
            for bar in self._list_callbacks(kinds.ProgbarLogger):
                bar.on_epoch_begin(self.epoch)
        self._epoch_call, self._epoch_generators = saved["epoch_call"], saved["epoch_generators"]

    def end_again(self, *, is_newcomer: bool) -> None:
        assert self.record is not None
        if self._states is not None:
            self._states.restore(self.record["callbacks"], is_main=self._is_main())
        if is_newcomer and self._reading is not None:
            self._reading.restore(self.record["reading"])
        # A checkpoint does not hold it: those who have left this fit out begin anew, and so will who joins them.
        self.record = self.record | {"reading": self._capture_reading()}

    def _list_callbacks(self, kind: type) -> list[Any]:
        return [] if self._list is None else [each for each in self._list.callbacks if isinstance(each, kind)]

    # What is saved of it.

    def capture(self, tell: Callable[[str], None]) -> Record:
        """At a border. Callbacks that run in the background have come to their end then."""
        if self._list is not None:
            refuse_backups(self._list.callbacks)
            self._list._flush_futures()
        return {
            "callbacks": [] if self._states is None else self._states.capture(tell),
            "trained": self.trained,
            "epoch": self.epoch,
            "epoch_call": self._epoch_call,
            "epoch_generators": self._epoch_generators,
            "reading": self._capture_reading(),
            "is_between": False,
        }

    def capture_between(self, tell: Callable[[str], None]) -> Record:
        """When its last epoch is over: from here a longer one goes on with the next epoch."""
        return self.capture(tell) | {"epoch": self._num_epochs, "is_between": True}

    def end(self, tell: Callable[[str], None]) -> Record:
        """It is over, and will be left out by a run that goes on."""
        callbacks = [] if self._states is None else self._states.capture(tell, is_over=True)
        counts = {"calls": self._calls.count, "num_calls": self._calls.count - self.first_call}
        epochs = {"epochs": self.epoch + 1 if self._is_stopped else self._num_epochs, "is_stopped": self._is_stopped}
        rest = {"is_cut": self._is_cut, "callbacks": callbacks, "reading": self._capture_reading()}
        return counts | epochs | rest

    def _capture_reading(self) -> list[int]:
        return [] if self._reading is None else self._reading.capture()
