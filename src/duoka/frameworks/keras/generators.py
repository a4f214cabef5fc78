"""The generators that shuffle data: all workers must draw the same from them, or they would see different batches.

They start equal, and stay so while all workers do the same. Something that only the main worker does, such as an
evaluation of its own, may draw from them; then the others take over its state, which is that of one device.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.frameworks.exchange.agreement import take_from_first

_PYTHON_WORDS = 625
_NUMPY_WORDS = 624


@dataclass(frozen=True)
class Generator:
    """The state of a generator as bytes, equally many on all workers; none where it is not in use."""

    read: Callable[[], Array]
    write: Callable[[Array], None]


def digest(generators: tuple[Generator, ...]) -> bytes:
    number = 0
    for generator in generators:
        number = zlib.crc32(generator.read().data, number)
    return number.to_bytes(4, "little")


def take_states_from_first(collective: Collective, generators: tuple[Generator, ...]) -> None:
    """All workers call it, once they know from digests that their states differ."""
    for generator in generators:
        state = generator.read()
        if len(state):
            generator.write(take_from_first(collective, state, "of the state of a generator"))


def read_random(source: Any) -> Array:
    """The state of a `random.Random`, or of the module."""
    _, words, spare = source.getstate()
    return _join(np.array(words, np.uint32), [spare is not None, spare or 0.0])


def write_random(source: Any, data: Array) -> None:
    words, (has_spare, spare) = _split(data, _PYTHON_WORDS)
    source.setstate((3, tuple(words.tolist()), spare if has_spare else None))


def _read_numpy() -> Array:
    state: Any = np.random.get_state(legacy=True)
    kind, words, *rest = state
    return _join(words, rest) if kind == "MT19937" else np.empty(0, np.uint8)


def _write_numpy(data: Array) -> None:
    words, (position, has_spare, spare) = _split(data, _NUMPY_WORDS)
    np.random.set_state(("MT19937", words, int(position), int(has_spare), spare))


def _read_torch() -> Array:
    torch: Any = sys.modules.get("torch")
    return np.empty(0, np.uint8) if torch is None else torch.get_rng_state().numpy().copy()


def _write_torch(data: Array) -> None:
    torch: Any = sys.modules["torch"]
    torch.set_rng_state(torch.from_numpy(data.copy()))


def _join(words: Array, numbers: list[Any]) -> Array:
    return np.concatenate([words.view(np.uint8), np.array(numbers, np.float64).view(np.uint8)])


def _split(data: Array, num_words: int) -> tuple[Array, list[float]]:
    words, numbers = np.split(data, [num_words * 4])
    return words.copy().view(np.uint32), numbers.copy().view(np.float64).tolist()


# Before a training all of them; between epochs only PyTorch's: the others may be in use by threads that read ahead.
AT_THE_START = (
    Generator(partial(read_random, random), partial(write_random, random)),
    Generator(_read_numpy, _write_numpy),
    Generator(_read_torch, _write_torch),
)
BETWEEN_EPOCHS = AT_THE_START[2:]
