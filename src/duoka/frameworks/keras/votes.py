"""When one worker's callback stops the training, all of them stop, at the same batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras.src.utils import is_default

from duoka.collectives.collective import Collective
from duoka.frameworks.exchange.agreement import hear_all
from duoka.frameworks.keras.equality import Equality
from duoka.frameworks.keras.generators import BETWEEN_EPOCHS, digest, take_states_from_first

_STOP, _GO_ON = b"s", b"g"
_OF_BATCHES = ("on_train_batch_end", "on_batch_end", "on_train_batch_begin", "on_batch_begin")


class EpochVote(keras.callbacks.Callback):
    """Comes after the user's callbacks, at the end of each epoch. It never touches `self.model`: on JAX that costs.

    An exchange of its own: the next step's would come too late, since one device stops before it.
    """

    def __init__(self, attached: Any, collective: Collective, equality: Equality) -> None:
        super().__init__()
        self._attached, self._collective, self._equality = attached, collective, equality

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._vote(f"at the beginning of epoch {epoch}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        when, generators = f"at the end of epoch {epoch}", digest(BETWEEN_EPOCHS)
        notes = self._vote(when, generators + self._equality.note())
        stop = 1 + len(generators)
        self._equality.compare([note[stop:] for note in notes], when, can_remove=True)
        if len({note[1:stop] for note in notes}) > 1:
            take_states_from_first(self._collective, BETWEEN_EPOCHS)

    def _vote(self, name: str, more: bytes = b"") -> list[bytes]:
        mine = _STOP if self._attached.stop_training else _GO_ON
        notes = hear_all(self._collective, mine + more, name)
        if any(note[:1] == _STOP for note in notes):
            self._attached.stop_training = True
        return notes


class BatchVote(EpochVote):
    """After every batch, too: for callbacks of the user's own, which may stop by a clock."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._vote(f"at the end of batch {batch}")


def watch_batches(callbacks: Sequence[Any]) -> bool:
    """Whether one of them may stop after any batch."""
    own = [callback for callback in callbacks if not _decides_by_logs(callback)]
    return any(not is_default(getattr(callback, name)) for callback in own for name in _OF_BATCHES)


def _decides_by_logs(callback: Any) -> bool:
    """Keras's own callbacks do, and logs are equal on all workers."""
    is_own = not type(callback).__module__.startswith("keras.")
    return not is_own and not isinstance(callback, keras.callbacks.LambdaCallback)
