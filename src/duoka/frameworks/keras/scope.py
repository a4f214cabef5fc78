"""`with strategy.scope():`: models that are made, compiled or trained inside belong to the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import FrameType
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer

from duoka.errors import MismatchError
from duoka.frameworks.keras.attachment import is_attached
from duoka.frameworks.replacing import replacing

_open: list[Any] = []  # the owners of the scopes that are open, the innermost last


@contextmanager
def watch_models(owner: Any, attach: Callable[[Any], None]) -> Iterator[None]:
    """Attach each model that is made, compiled or trained in this block. The same owner may open it again inside."""
    if _open and _open[-1] is not owner:
        raise MismatchError(
            "The scope of one strategy was opened inside the scope of another.",
            why="a model belongs to one run.",
            do="use one strategy everywhere.",
        )
    _open.append(owner)
    with _patched(attach) if len(_open) == 1 else nullcontext():
        try:
            yield
        finally:
            _open.pop()


@contextmanager
def _patched(attach: Callable[[Any], None]) -> Iterator[None]:
    def after(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: Any, *args: Any, **kwargs: Any) -> None:
            function(model, *args, **kwargs)
            attach(model)

        return run

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(model: Any, *args: Any, **kwargs: Any) -> Any:
            attach(model)
            return function(model, *args, **kwargs)

        return run

    def instead(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Models that belong to a run have a `fit` of their own, which comes here again."""

        @wraps(function)
        def run(model: Any, *args: Any, **kwargs: Any) -> Any:
            if is_attached(model):
                return function(model, *args, **kwargs)
            attach(model)
            return getattr(model, name)(*args, **kwargs) if is_attached(model) else function(model, *args, **kwargs)

        return run

    training = [(keras.Model, name, instead(name, getattr(keras.Model, name))) for name in ("fit", "train_on_batch")]
    making = [
        (Trainer, "__init__", after(Trainer.__init__)),
        (Trainer, "compile", before(Trainer.compile)),
    ]
    with replacing([*making, *training]):
        yield


def is_training_now(model: Any) -> bool:
    """Whether somebody up the stack is in `fit` of this model, which has not belonged to a run until now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False
