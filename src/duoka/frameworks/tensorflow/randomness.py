"""Generators inside a step: each replica draws numbers of its own, and replica 0 those of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import random_seed

from duoka.collectives.arrays import Array
from duoka.data.seeds import derive
from duoka.frameworks.keras.seeds_of_replicas import state_for
from duoka.frameworks.replacing import replacing


def state_of_replica(state: Array, replica: int) -> Array:
    """Of a Keras SeedGenerator (seed, counter), or of a tf.random.Generator (counter, counter, key)."""
    if replica == 0 or len(state) == 2:
        return state_for(state, replica)
    key = derive("tensorflow generator", int(state[-1]), replica) & 0x7FFFFFFFFFFFFFFF
    return np.array([*state[:-1], key], state.dtype)


@contextmanager
def watching_generators(see: Callable[[Any], None]) -> Iterator[None]:
    """`see` gets the variable that holds the state of a generator, before it is drawn from."""
    kinds: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (keras.random.SeedGenerator, "next", lambda generator: generator.state.value),
        (tf.random.Generator, "skip", lambda generator: generator.state),
    ]

    def make(original: Callable[..., Any], state: Callable[[Any], Any]) -> Callable[..., Any]:
        def draw(generator: Any, *args: Any, **kwargs: Any) -> Any:
            see(state(generator))
            return original(generator, *args, **kwargs)

        return draw

    with replacing([(kind, name, make(getattr(kind, name), state)) for kind, name, state in kinds]):
        yield


@contextmanager
def watching_random_operations(see: Callable[[], None]) -> Iterator[None]:
    """`see` is called when an operation of tf.random, whose numbers come from no generator, asks for its seed."""
    original = random_seed.get_seed

    def get_seed(*args: Any, **kwargs: Any) -> Any:
        see()
        return original(*args, **kwargs)

    with replacing([(random_seed, "get_seed", get_seed)]):
        yield


def say_random(name: str) -> str:
    return (
        f"{name} draws from tf.random: every worker draws the same numbers, which follow neither step nor"
        " replica and are outside of the promise of equal bits; keras.random.SeedGenerator and"
        " tf.random.Generator are inside, with numbers for each replica"
    )
