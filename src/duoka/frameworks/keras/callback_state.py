"""What callbacks have learned in a `fit`: the plain values among their attributes that have changed since it began.

That is where Keras's own keep it (the best loss so far, how long it has not been better, the history), and most of the
users' own. Those with `state_dict` and `load_state_dict` are asked instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras import callbacks as kinds
from keras.src.callbacks.monitor_callback import MonitorCallback

from duoka.errors import CheckpointError
from duoka.frameworks.exchange.digest import as_bytes, digest_bytes
from duoka.frameworks.keras.votes import EpochVote

_NUMBERS = (bool, int, float, complex, str, type(None))
_OURS = (EpochVote, kinds.ProgbarLogger)  # they follow from the rest
_NO_STATE = {"params", "_model", "model", "validation_data"}
_NOT_OF = {
    kinds.CSVLogger: {"append", "append_header"},  # they tell how its file was opened
    MonitorCallback: {"min_delta"},  # made negative with the first epoch that ends, in each process
}
_NOT_LATER = {kinds.EarlyStopping: {"best_weights"}}  # of no use once its training is over
_OBJECTS = (keras.Layer, keras.optimizers.Optimizer, keras.Variable, keras.callbacks.Callback)


class CallbackStates:
    """Of the callbacks of one `fit`, as they are before its beginning."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = [callback for callback in callbacks if not isinstance(callback, _OURS)]
        self._before = [_fingerprints(callback) for callback in self._callbacks]
        self._after: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Their `on_train_begin` has run. It does so again in a `fit` that goes on."""
        self._after = [_fingerprints(callback) for callback in self._callbacks]

    def capture(self, tell: Callable[[str], None], *, is_over: bool = False) -> list[dict[str, Any]]:
        """What has changed since `fit` began. Of one that is over only what may be looked at later."""
        after = self._before if is_over else self._after
        triples = zip(self._callbacks, self._before, after, strict=True)
        return [_capture(*triple, tell, is_over=is_over) for triple in triples]

    def restore(self, saved: Sequence[dict[str, Any]], *, is_main: bool) -> None:
        """The main worker, who saves, has those that were saved; another one may have been given fewer."""
        names, had = [type(callback).__name__ for callback in self._callbacks], [each["kind"] for each in saved]
        if is_main and names != had:
            raise CheckpointError(
                f"This fit has other callbacks than the saved one: {', '.join(names)}; saved: {', '.join(had)}.",
                why="what callbacks have learned is part of a run.",
                do="give the same callbacks in the same order, or begin a new run in another directory.",
            )
        for callback, each in self._match(saved):
            if "state" in each:
                callback.load_state_dict(each["state"])
            for name, value in each["attributes"].items():
                _put(vars(callback), name, value)

    def _match(self, saved: Sequence[dict[str, Any]]) -> list[tuple[Any, dict[str, Any]]]:
        """Each callback, and what was saved of the next one of its kind."""
        remaining = list(saved)
        pairs = []
        for callback in self._callbacks:
            kind = type(callback).__name__
            place = next((n for n, each in enumerate(remaining) if each["kind"] == kind), None)
            if place is not None:
                pairs.append((callback, remaining[place]))
                del remaining[: place + 1]
        return pairs

    @contextmanager
    def going_on(self, saved: Sequence[dict[str, Any]], is_main: bool) -> Iterator[None]:
        """Around `on_train_begin` of a `fit` that goes on: a file with lines of epochs is not begun anew."""
        logs = [(callback, kept) for callback, kept in self._match(saved) if "size" in kept]
        former = [callback.append for callback, _ in logs]
        for callback, kept in logs:
            callback.append = True
            if is_main:
                _cut(callback.filename, kept["size"])
        try:
            yield
        finally:
            for (callback, _), append in zip(logs, former, strict=True):
                callback.append = append


def refuse_backups(callbacks: Sequence[Any]) -> None:
    if any(isinstance(callback, kinds.BackupAndRestore) for callback in callbacks):
        raise CheckpointError(
            "BackupAndRestore was given to the fit of a run with strategy.checkpoint.",
            why="both would put the run back to where they have saved it.",
            do="leave the callback out: strategy.checkpoint saves more often, and what callbacks have learned, too.",
        )


def _capture(
    callback: Any, before: dict[str, Any], after: dict[str, Any], tell: Callable[[str], None], *, is_over: bool
) -> dict[str, Any]:
    kind = type(callback).__name__
    if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
        return {"kind": kind, "state": callback.state_dict(), "attributes": {}}
    left_out = _list_names(_NOT_OF, callback) | (_list_names(_NOT_LATER, callback) if is_over else set())
    changed = {
        name: value
        for name, value in _plain_attributes(callback).items()
        if name not in left_out and not (before.get(name) == after.get(name) == _fingerprint(value))
    }
    _name_unknown(callback, tell)
    size = {} if is_over or not isinstance(callback, kinds.CSVLogger) else {"size": _size(callback.filename)}
    return {"kind": kind, "attributes": changed} | size


def _fingerprints(callback: Any) -> dict[str, Any]:
    return {name: _fingerprint(value) for name, value in _plain_attributes(callback).items()}


def _fingerprint(value: Any) -> Any:
    """Equal for equal values. Of arrays no copy is kept: a callback may hold a whole dataset."""
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype), value.shape, digest_bytes(as_bytes(np.asarray(value)))
    if type(value) is dict:
        return dict, [(key, _fingerprint(part)) for key, part in value.items()]
    if type(value) in (list, tuple):
        return type(value), [_fingerprint(part) for part in value]
    return type(value), repr(value)


def _list_names(table: dict[type, set[str]], callback: Any) -> set[str]:
    return {name for kind, names in table.items() if isinstance(callback, kind) for name in names}


def _plain_attributes(callback: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(callback).items() if name not in _NO_STATE and _is_plain(value)}


def _is_plain(value: Any, depth: int = 8) -> bool:
    """What a file can hold, and give back as it was."""
    if type(value) in _NUMBERS:
        return True
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biufc"
    if depth == 0 or type(value) not in (list, tuple, dict):
        return False
    parts = [*value, *value.values()] if type(value) is dict else value
    return all(_is_plain(part, depth - 1) for part in parts)


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Into the list or dictionary that is there: the script may hold it, too."""
    present = attributes.get(name)
    if type(present) is list and type(value) is list:
        present[:] = value
    elif type(present) is dict and type(value) is dict:
        present.clear()
        present.update(value)
    else:
        attributes[name] = value


def _name_unknown(callback: Any, tell: Callable[[str], None]) -> None:
    """Attributes of users' own callbacks that may be state, and cannot be saved."""
    if type(callback).__module__.startswith("keras."):
        return
    unknown = [
        name
        for name, value in vars(callback).items()
        if name not in _NO_STATE and not (_is_plain(value) or callable(value) or isinstance(value, _OBJECTS))
    ]
    if unknown:
        tell(
            f"checkpoints do not hold {', '.join(sorted(unknown))} of the callback {type(callback).__name__}: give it"
            " state_dict and load_state_dict if a run that goes on needs them"
        )


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _cut(path: str, size: int) -> None:
    """Take away what was written after the state was saved: those epochs come again."""
    if _size(path) > size:
        os.truncate(path, size)
