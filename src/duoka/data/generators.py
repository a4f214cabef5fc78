"""The generators of random numbers that Python and NumPy have for the whole process, taken apart and put back."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np

Source = Any  # a random.Random, or the module


def capture_generators() -> dict[str, Any]:
    """Plain values and arrays, for a checkpoint."""
    return {"python": capture_python(random), "numpy": np.random.get_state(legacy=False)}


def restore_generators(state: dict[str, Any]) -> None:
    restore_python(random, state["python"])
    np.random.set_state(state["numpy"])


def capture_python(source: Source) -> list[Any]:
    version, words, gauss = source.getstate()
    return [version, np.array(words[:-1], np.uint32), words[-1], gauss]


def restore_python(source: Source, state: list[Any]) -> None:
    version, words, last, gauss = state
    source.setstate((version, (*words.tolist(), last), gauss))


def as_plain(state: Any) -> Any:
    """The same without arrays, which have one dimension, as JSON has it."""
    if isinstance(state, np.ndarray):
        return {"array": base64.b64encode(state.tobytes()).decode(), "dtype": state.dtype.name}
    if isinstance(state, dict):
        return {name: as_plain(part) for name, part in state.items()}
    return [as_plain(part) for part in state] if isinstance(state, list) else state


def from_plain(state: Any) -> Any:
    """
    >>> from_plain(as_plain({"key": np.array([1, 2], np.uint32), "gauss": None}))
    {'key': array([1, 2], dtype=uint32), 'gauss': None}
    """
    if isinstance(state, dict) and state.keys() == {"array", "dtype"}:
        return np.frombuffer(base64.b64decode(state["array"]), state["dtype"]).copy()
    if isinstance(state, dict):
        return {name: from_plain(part) for name, part in state.items()}
    return [from_plain(part) for part in state] if isinstance(state, list) else state
