"""A state in a file, and back. Never pickle: what is read cannot run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO

from duoka.checkpoint.atomic import write_atomically
from duoka.checkpoint.codec import Codec
from duoka.checkpoint.storage import StoredTensor, damaged, read_tree, write_storage
from duoka.checkpoint.tree import describe, rebuild
from duoka.errors import CheckpointError


def save_state(path: Any, state: Any, codecs: Sequence[Codec]) -> None:
    """Write a state as one file, as a whole or not at all. Every error is a CheckpointError."""
    name = _read_path(path)
    if state is None:
        raise CheckpointError("There is nothing to save: the state is None.", do="give a state_dict, on every worker.")
    tree, tensors = collect(state, codecs)
    try:
        write_atomically(name, lambda file: write_storage(file, tree, tensors))
    except OSError as error:
        raise CheckpointError(
            f"{name} could not be saved.",
            why=f"{error.strerror or error}; what was there before is untouched.",
            do=_advice(name),
        ) from error


def collect(state: Any, codecs: Sequence[Codec]) -> tuple[Any, dict[str, StoredTensor]]:
    """The shape of a state, and its tensors by their names. Nothing is copied yet."""
    collected = _Collected(codecs)
    try:
        return describe(state, collected.put), collected.tensors
    except RecursionError:
        raise CheckpointError("The state is nested too deeply to be saved.") from None


def load_state(path: Any, codecs: Sequence[Codec], device: Any = None) -> Any:
    """The state that was saved under this path. Every error is a CheckpointError that names the file."""
    name = _read_path(path)
    with naming_errors(name), open(name, "rb") as file:
        return load_tensors(file, name, read_tree(file, name), codecs, device)


def load_tensors(file: BinaryIO, name: str, tree: Any, codecs: Sequence[Codec], device: Any = None) -> Any:
    """The state that a file's tree describes, with the tensors that the file holds."""
    # Here and not above: it takes a while, and most runs load nothing.
    from safetensors import safe_open

    by_kind = {codec.kind: codec for codec in codecs}
    made: dict[str, Any] = {}
    readers: dict[str, Any] = {}
    with ExitStack() as stack:

        def get(record: dict[str, Any]) -> Any:
            stored, codec = record["name"], by_kind.get(record["kind"])
            if codec is None:
                raise CheckpointError(
                    f"{name} holds tensors of {record['kind']}.", do=f"import {record['kind']} before loading it."
                )
            if codec.kind not in readers:
                readers[codec.kind] = stack.enter_context(safe_open(_same_file(file, name), codec.reader))
            if stored not in made:
                made[stored] = codec.restore(readers[codec.kind].get_tensor(stored), record["form"], device)
            return made[stored]

        return rebuild(tree, get)


@contextmanager
def naming_errors(name: str) -> Iterator[None]:
    """Whatever goes wrong in reading this file is a CheckpointError that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read.", why=f"{error.strerror or error}.") from error
    except RecursionError:
        raise damaged(name, "what it holds is nested too deeply.") from None
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(name, f"{error}") from error


class _Collected:
    """Collects what is stored beside the tree, each thing once, under names that people can read."""

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self._codecs = codecs
        self._records: dict[Any, dict[str, Any]] = {}
        self.tensors: dict[str, StoredTensor] = {}

    def put(self, value: Any, place: str) -> dict[str, Any] | None:
        for codec in self._codecs:
            if codec.owns(value):
                return self._put(codec, value, place)
        return None

    def _put(self, codec: Codec, value: Any, place: str) -> dict[str, Any]:
        identity = codec.kind, codec.identity(value)
        record = self._records.get(identity)
        if record is None:
            stored, form = codec.store(value, place)
            name = self._name(place)
            self.tensors[name] = stored
            record = self._records[identity] = {"name": name, "kind": codec.kind, "form": form}
        return record

    def _name(self, place: str) -> str:
        """`state['model']['0.weight']` becomes `model.0.weight`, or, when that is taken, `model.0.weight#2`."""
        words = place.removeprefix("state").replace("][", ".").strip("[]").replace("'", "")
        name, number = words or "state", 2
        while name in self.tensors or name == "__metadata__":
            name, number = f"{words or 'state'}#{number}", number + 1
        return name


def _read_path(path: Any) -> str:
    try:
        name = os.fspath(path)
    except TypeError:
        name = None
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{path!r} is no path to a file.", do="give a string or a pathlib.Path.")
    return name


def _same_file(file: BinaryIO, name: str) -> str:
    """A path to this very file, also when somebody has put another one in its place meanwhile."""
    path = f"/proc/self/fd/{file.fileno()}"
    return path if os.path.exists(path) else name


def _advice(name: str) -> str:
    directory = os.path.dirname(os.path.realpath(name))
    if not os.path.isdir(directory):
        return f"make the directory {directory} first."
    return "choose another place, or make room there."
