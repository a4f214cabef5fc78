"""What members of a run write into their marks, for workers that come back: states as JSON, never pickle.

All marks of a run are kept, and there is one for each pass: of the user's own objects they hold only what is small.
"""

from __future__ import annotations

import base64
import io
import os
from typing import Any

import numpy as np

from duoka.checkpoint.files import collect, load_state
from duoka.checkpoint.storage import write_storage
from duoka.checkpoint.tree import describe, rebuild
from duoka.data.sizes import count_bytes
from duoka.data.trail import Place
from duoka.errors import CheckpointError
from duoka.frameworks.saving import list_codecs
from duoka.strategies.also import Also

Facts = dict[str, Any]
_LARGEST_BYTES = 1 << 12  # of an object of the user's


def pack(record: Any) -> Facts:
    """As JSON has it. Types come back as they were; what cannot be saved is a CheckpointError.

    >>> unpack(pack({"best": np.float32(0.5), "losses": np.arange(2), "pair": (1, None)}))
    {'best': np.float32(0.5), 'losses': array([0, 1]), 'pair': (1, None)}
    """
    return {"record": describe(record, _put)}


def unpack(facts: Facts) -> Any:
    return rebuild(facts["record"], _get)


def _put(value: Any, place: str) -> Facts | None:
    if isinstance(value, (np.ndarray, np.generic)):
        kind = "array" if isinstance(value, np.ndarray) else "number"
        data = np.ascontiguousarray(value).tobytes()
        return {"data": _as_text(data), "dtype": str(value.dtype), "shape": list(value.shape), "kind": kind}
    if any(codec.owns(value) for codec in list_codecs()):
        return {"data": _as_text(_write_file(value)), "kind": "file"}
    return None


def _get(stored: Facts) -> Any:
    data = base64.b64decode(stored["data"])
    if stored["kind"] == "file":
        return _read_file(data)
    array = np.frombuffer(data, stored["dtype"]).reshape(stored["shape"]).copy()
    return array if stored["kind"] == "array" else array[()]


def _as_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _write_file(tensor: Any) -> bytes:
    """A tensor of a framework, as checkpoints have it."""
    file = io.BytesIO()
    write_storage(file, *collect(tensor, list_codecs()))
    return file.getvalue()


def _read_file(data: bytes) -> Any:
    with os.fdopen(os.memfd_create("duoka-mark"), "wb") as file:
        file.write(data)
        file.flush()
        return load_state(f"/proc/self/fd/{file.fileno()}", list_codecs())


# Objects of the user's own: a script may decide by them, between its loops, where it goes on.


def choose_handed(states: dict[str, Any]) -> dict[str, Any]:
    """Those of them that are handed over in marks. None stands for one that is not known."""
    return {name: state for name, state in states.items() if _is_handed(state)}


def _is_handed(state: Any) -> bool:
    try:
        return state is not None and count_bytes(state) <= _LARGEST_BYTES and bool(pack(state))
    except CheckpointError:
        return False


def describe_also(place: Place | None) -> Facts:
    """What a mark of this place says of the user's objects; others are as the script has them there."""
    handed = {} if place is None else choose_handed(place.also)
    return {"also": pack(handed)} if handed else {}


def take_also(also: Also, facts: Facts) -> None:
    if "also" in facts:
        also.take(unpack(facts["also"]))
