"""Each replica draws its own random numbers: replica 0 those of the model, the others from seeds made of them."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

from duoka.collectives.arrays import Array
from duoka.data.seeds import derive


def seed_variables(model: Any) -> list[Any]:
    """The states of the model's seed generators, each once."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for generator in layer._seed_generators:
            found[id(generator.state)] = generator.state
    return list(found.values())


def global_seed_variable() -> Any:
    """The state of the generator behind `seed=None`, which belongs to no model. It is made here if need be.

    Otherwise the first step would make it; its seed is drawn as it would be then, and nobody else's draws change.
    """
    if (known := global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)) is not None:
        return known.state
    state = random.getstate()
    try:
        return global_seed_generator().state
    finally:
        random.setstate(state)


def state_for(state: Array, replica: int) -> Array:
    """A generator's state (seed, counter) as a replica uses it.

    A hash, not a sum: PyTorch draws from seed + counter, and replica 1 would draw what replica 0 draws a step later.
    """
    if replica == 0:
        return state
    return np.array([_seed_for(int(state[0]), replica), int(state[1])], state.dtype)


@lru_cache(maxsize=4096)
def _seed_for(seed: int, replica: int) -> int:
    return derive("keras seed", seed, replica) & 0x7FFFFFFF
