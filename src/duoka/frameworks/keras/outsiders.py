"""Models that were forgotten: trained beside a run of several workers, without belonging to it. One line says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakMethod, finalize

import keras

from duoka.frameworks.keras.attachment import is_attached

_NAME = "make_train_function"  # what `fit` and `train_on_batch` of all backends call, on each model


def watch_outsiders(tell: Callable[[str], None]) -> None:
    """Until one was seen, or until the object that `tell` belongs to is gone; then Keras is as it was."""
    trainer: Any = next(kind for kind in keras.Model.__mro__ if _NAME in vars(kind))
    former, speaker = vars(trainer)[_NAME], WeakMethod(tell)
    if hasattr(former, "__wrapped__"):
        return  # another run of this process watches

    @wraps(former)
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        say = speaker()
        if say is not None and not is_attached(model):
            stop()
            say(
                f"{model.name} is not part of the strategy, and every worker trains all of it; build it inside"
                " `with strategy.scope():` or strategy.prepare it"
            )
        return former(model, *args, **kwargs)

    def stop() -> None:
        if vars(trainer)[_NAME] is run:
            setattr(trainer, _NAME, former)

    setattr(trainer, _NAME, run)
    finalize(tell.__self__, stop).atexit = False  # type: ignore[attr-defined]
