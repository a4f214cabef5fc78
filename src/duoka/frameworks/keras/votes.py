"""When one worker's callback stops the training, all of them stop, at the same batch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras

from duoka.collectives.collective import Collective


class EpochVote(keras.callbacks.Callback):
    """Comes after the user's callbacks, at the end of each epoch. It never touches `self.model`: on JAX that costs."""

    def __init__(self, attached: Any, collective: Collective) -> None:
        super().__init__()
        self._attached, self._collective = attached, collective

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._vote(f"at the end of epoch {epoch}")

    def _vote(self, name: str) -> None:
        exchange = self._collective.exchange([], name)
        note = b"stop" if self._attached.stop_training else b""
        is_committed = False
        while not is_committed:
            for replica in exchange.missing:
                exchange.deposit(replica, note)
            is_committed = exchange.commit()
        if any(exchange.notes):
            self._attached.stop_training = True


class BatchVote(EpochVote):
    """After every batch, too: for callbacks of the user's own, which may stop by a clock."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._vote(f"at the end of batch {batch}")


def with_vote(model: Any, collective: Collective, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `fit`, all by name, with a vote behind the user's callbacks."""
    arguments = dict(inspect.signature(type(model).fit).bind_partial(model, *args, **kwargs).arguments)
    arguments.pop(next(iter(arguments)))  # self
    arguments.update(arguments.pop("kwargs", {}))
    given = arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):
        given.append(_vote_for(given.callbacks, model, collective))
    else:
        callbacks = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
        arguments["callbacks"] = [*callbacks, _vote_for(callbacks, model, collective)]
    return arguments


def _vote_for(callbacks: Sequence[Any], model: Any, collective: Collective) -> EpochVote:
    """Keras's own callbacks decide by the logs, which are equal on all workers."""
    own = [callback for callback in callbacks if not type(callback).__module__.startswith("keras.")]
    base = keras.callbacks.Callback
    watches_batches = any(
        getattr(type(callback), name, None) is not getattr(base, name)
        for callback in own
        for name in ("on_train_batch_end", "on_batch_end", "on_train_batch_begin", "on_batch_begin")
    ) or any(isinstance(callback, keras.callbacks.LambdaCallback) for callback in callbacks)
    return (BatchVote if watches_batches else EpochVote)(model, collective)
