"""`model.save`, `save_weights` and `export` write once, on the main worker, whole or not at all.

They may be called by all, by the main one alone, or in a callback. The others wait until it is written, and one of them
writes when the main one is lost meanwhile.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from keras.src.utils import file_utils, io_utils

from duoka.checkpoint.atomic import write_atomically_by_name
from duoka.collectives.deeds import Deeds
from duoka.errors import CheckpointError

Save = Callable[..., Any]


def save_once(save: Save, deeds: Deeds, is_done: Callable[[Any], bool], *, makes_folders: bool = False) -> Save:
    """The same call, for one worker. Files in other places than a local folder are left to Keras.

    `is_done`: told the path, whether the script has saved this before, and does so again on its way to a saved state.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(save).bind(*args, **kwargs).arguments
        path = bound.get(next(iter(bound), ""))
        return None if is_done(path) else deeds.do(f"{save.__name__} {path}", lambda: write(*args, **kwargs))

    def write(*args: Any, **kwargs: Any) -> Any:
        options = dict(inspect.signature(save).bind(*args, **kwargs).arguments)
        filepath = options.pop(next(iter(options)))
        options.update(options.pop("kwargs", {}))
        if not _is_local(filepath) or options.get("max_shard_size") is not None:
            return save(filepath, **options)  # shards are named after the file, and are several
        path = os.path.realpath(filepath)
        if os.path.exists(path) and not options.get("overwrite", True):
            if not _may_overwrite(filepath):
                return None
            options["overwrite"] = True
        with _explaining(filepath):
            if makes_folders:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            return write_atomically_by_name(
                path, lambda partial: _save_to(partial, filepath, lambda: save(partial, **options))
            )

    return run


def _is_local(path: Any) -> bool:
    is_path = isinstance(path, (str, os.PathLike))
    return is_path and not str(path).startswith("hf://") and not file_utils.is_remote_path(os.fspath(path))


def _may_overwrite(path: Any) -> bool:
    try:
        return bool(io_utils.ask_to_proceed_with_overwrite(str(path)))
    except EOFError:
        raise CheckpointError(
            f"The model was not saved to {path}, which is there already.",
            why="overwrite=False asks what to do, and a worker has no keyboard.",
            do="choose another name, or leave overwrite=False out.",
        ) from None


def _save_to(partial: str, path: Any, save: Callable[[], Any]) -> Any:
    """Whatever is said about the place is said about the one that was asked for."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            return save()
    except ValueError as error:
        raise ValueError(str(error).replace(partial, str(path))) from None
    finally:
        sys.stdout.write(said.getvalue().replace(partial, str(path)))


@contextmanager
def _explaining(path: Any) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        folder = os.path.dirname(os.path.realpath(path))
        is_missing = not os.path.isdir(folder)
        raise CheckpointError(
            f"The model could not be saved to {path}.",
            why=f"there is no folder {folder}." if is_missing else f"{error.strerror or error}.",
            do="make the folder first." if is_missing else "make room, or choose another place; the old file is there.",
        ) from error
