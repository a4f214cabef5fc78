"""The global generators, seeded for one replica's part of a step, and put back as they were afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Python's, NumPy's and PyTorch's global generators start from this seed; outside, nothing has happened."""
    with KeptGenerators():
        seed_all(number)
        yield


class KeptGenerators:
    """The global generators as they are now. What is seeded by `seed_all` until they are put back leaves no trace.

    As a block: whatever is seeded or drawn inside, the global generators are restored afterwards.
    """

    def __enter__(self) -> KeptGenerators:
        self._is_ending = sys.is_finalizing  # kept: where a loop is left behind, names of modules may be None by then
        self._python_state = random.getstate()
        self._numpy_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._torch_state = torch.get_rng_state()
        self._cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_ending():
            return
        random.setstate(self._python_state)
        np.random.set_bit_generator(self._numpy_generator)  # type: ignore[attr-defined]
        torch.set_rng_state(self._torch_state)
        for index, state in enumerate(self._cuda_states):
            torch.cuda.set_rng_state(state, index)

    def put_back(self) -> None:
        self.__exit__()


def seed_all(number: int) -> None:
    random.seed(number)
    # A generator of its own, made once: putting back a state of NumPy's global one takes twenty times as long as this.
    np.random.set_bit_generator(_generator_of_bodies)  # type: ignore[attr-defined]
    np.random.seed([number & 0xFFFFFFFF, number >> 32])
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


_generator_of_bodies = np.random.MT19937()
