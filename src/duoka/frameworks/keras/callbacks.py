"""Callbacks run on every worker, so that they know the same; those that write do so on the main one.

Who is the main one is asked at the moment of writing: when that worker is lost, the next one goes on where it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keras import callbacks as kinds

IsMain = Callable[[], bool]
Shadows = dict[str, Any]  # methods that stand before those of a class, on one instance, by name


@contextmanager
def writing_once(callbacks: Sequence[Any], is_main: IsMain) -> Iterator[None]:
    """For the time of one `fit`; nothing of it stays on the callbacks."""
    hidden: list[tuple[Any, Shadows, Shadows]] = []
    for callback in callbacks:
        for kind, shadow in _WRITERS.items():
            if isinstance(callback, kind):
                shadows = shadow(callback, is_main)
                hidden.append(
                    (callback, shadows, {name: vars(callback)[name] for name in shadows if name in vars(callback)})
                )
                vars(callback).update(shadows)
    try:
        yield
    finally:
        for callback, shadows, former in reversed(hidden):
            for name in shadows:
                vars(callback).pop(name, None)
            vars(callback).update(former)


def make_bar() -> Any:
    """What `fit` would make for itself, and call in the same way; made here, it can be muted."""
    bar = kinds.ProgbarLogger()
    bar.async_safe = True
    return bar


def _only_on_main(*names: str) -> Callable[[Any, IsMain], Shadows]:
    def shadow(callback: Any, is_main: IsMain) -> Shadows:
        return {name: _if_main(getattr(callback, name), is_main) for name in names if hasattr(callback, name)}

    return shadow


def _if_main(method: Callable[..., Any], is_main: IsMain) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) if is_main() else None

    return run


def _shadow_checkpoint(callback: Any, is_main: IsMain) -> Shadows:
    """All workers remember which model was the best one, and come to `model.save`: see `saving.py`."""
    save = callback._save_model

    def save_model(epoch: int, batch: int | None, logs: Any) -> None:
        verbose = callback.verbose
        callback.verbose = verbose if is_main() else 0
        try:
            save(epoch, batch, logs)
        finally:
            callback.verbose = verbose

    return {"_save_model": save_model}


def _shadow_backup(callback: Any, is_main: IsMain) -> Shadows:
    """Every worker restores; one backs up, and removes the backup at the end."""
    return _only_on_main("_save_model", "on_train_end")(callback, is_main)


def _shadow_csv(callback: Any, is_main: IsMain) -> Shadows:
    begin, write = callback.on_train_begin, callback.on_epoch_end

    def on_epoch_end(epoch: int, logs: Any = None) -> None:
        if not is_main():
            return
        if callback.csv_file is None or callback.csv_file.closed:  # the worker that had it open is lost
            append, callback.append = callback.append, True
            begin()
            callback.append = append
        write(epoch, logs)

    return {"on_train_begin": _if_main(begin, is_main), "on_epoch_end": on_epoch_end}


def _shadow_bar(callback: Any, is_main: IsMain) -> Shadows:
    set_params, own = callback.set_params, {"verbose": callback.verbose}

    def remember(params: Any) -> None:
        set_params(params)
        own["verbose"] = callback.verbose

    def muted(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            callback.verbose = own["verbose"] if is_main() else 0
            if callback.progbar is not None:
                callback.progbar.verbose = callback.verbose
            return method(*args, **kwargs)

        return run

    names = ("on_epoch_begin", "_update_progbar", "_finalize_progbar")
    return {
        "verbose": callback.verbose,
        "set_params": remember,
        **{name: muted(getattr(callback, name)) for name in names},
    }


class _Summaries:
    """TensorFlow's summaries, with writers that write nothing on any but the main worker."""

    def __init__(self, is_main: IsMain) -> None:
        import tensorflow

        self._summary, self._is_main = tensorflow.summary, is_main

    def __getattr__(self, name: str) -> Any:
        return getattr(self._summary, name)

    def create_file_writer(self, *args: Any, **kwargs: Any) -> Any:
        summary = self._summary
        return summary.create_file_writer(*args, **kwargs) if self._is_main() else summary.create_noop_writer()


def _shadow_tensorboard(callback: Any, is_main: IsMain) -> Shadows:
    begin = callback.on_epoch_begin
    was_main = is_main()

    def on_epoch_begin(epoch: int, logs: Any = None) -> None:
        nonlocal was_main
        if is_main() and not was_main:
            callback._writers, was_main = {}, True  # those that write are made when they are needed
        begin(epoch, logs)

    shadows = {"_summary_module": _Summaries(is_main), "on_epoch_begin": on_epoch_begin}
    return shadows | _only_on_main("_configure_embeddings", "_log_embeddings", "_start_trace", "_stop_trace")(
        callback, is_main
    )


_WRITERS: dict[type, Callable[[Any, IsMain], Shadows]] = {
    kinds.ModelCheckpoint: _shadow_checkpoint,
    kinds.BackupAndRestore: _shadow_backup,
    kinds.CSVLogger: _shadow_csv,
    kinds.ProgbarLogger: _shadow_bar,
    kinds.TensorBoard: _shadow_tensorboard,
    kinds.RemoteMonitor: _only_on_main("on_epoch_end"),
}
if hasattr(kinds, "OrbaxCheckpoint"):
    _WRITERS[kinds.OrbaxCheckpoint] = _only_on_main("_save_checkpoint")
