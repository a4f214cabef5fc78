"""The generators of random numbers that Python and NumPy have for the whole process, taken apart and put back."""

from __future__ import annotations

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
