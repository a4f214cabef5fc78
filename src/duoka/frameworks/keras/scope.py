"""`with strategy.scope():`: models that are made or compiled inside belong to the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keras.src.trainers.trainer import Trainer

from duoka.errors import MismatchError

_open: list[Any] = []  # the owners of the scopes that are open, the innermost last


@contextmanager
def watch_models(owner: Any, attach: Callable[[Any], None]) -> Iterator[None]:
    """Attach each model that is made or compiled in this block. The same owner may open it again inside."""
    if _open and _open[-1] is not owner:
        raise MismatchError(
            "The scope of one strategy was opened inside the scope of another.",
            why="a model belongs to one run.",
            do="use one strategy everywhere.",
        )
    make, compile = Trainer.__init__, Trainer.compile

    def made(model: Any, *args: Any, **kwargs: Any) -> None:
        make(model, *args, **kwargs)
        attach(model)

    def compiled(model: Any, *args: Any, **kwargs: Any) -> None:
        attach(model)
        compile(model, *args, **kwargs)

    _open.append(owner)
    if len(_open) == 1:
        Trainer.__init__, Trainer.compile = made, compiled
    try:
        yield
    finally:
        _open.pop()
        if not _open:
            Trainer.__init__, Trainer.compile = make, compile
