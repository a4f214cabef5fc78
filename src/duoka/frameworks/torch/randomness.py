"""The generators of a loop body: seeded from (seed, step, replica), and put back as they were afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Python's, NumPy's and PyTorch's global generators start from this seed; outside, nothing has happened."""
    with keeping_generators():
        seed_all(number)
        yield


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Whatever is seeded or drawn inside, the global generators are restored afterwards."""
    python_state = random.getstate()
    numpy_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    torch_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    is_ending = sys.is_finalizing  # kept here: where a loop is left behind, names of modules may be None by then
    try:
        yield
    finally:
        if not is_ending():
            _put_back(python_state, numpy_generator, torch_state, cuda_states)


def _put_back(python_state: Any, numpy_generator: Any, torch_state: torch.Tensor, cuda_states: Any) -> None:
    random.setstate(python_state)
    np.random.set_bit_generator(numpy_generator)  # type: ignore[attr-defined]
    torch.set_rng_state(torch_state)
    for index, state in enumerate(cuda_states):
        torch.cuda.set_rng_state(state, index)


def seed_all(number: int) -> None:
    random.seed(number)
    # A generator of its own, made once: putting back a state of NumPy's global one takes twenty times as long as this.
    np.random.set_bit_generator(_generator_of_bodies)  # type: ignore[attr-defined]
    np.random.seed([number & 0xFFFFFFFF, number >> 32])
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


_generator_of_bodies = np.random.MT19937()
