"""A state on its way to a worker that joins: the memory for it is there, or it is not begun."""

from __future__ import annotations

import os

import numpy as np
import pytest

from duoka.errors import OutOfMemory
from duoka.frameworks import handing
from duoka.strategies.also import Also

STATE = {"weights": np.arange(100_000, dtype=np.float32), "step": 7}


class Training:
    def __init__(self) -> None:
        self.restored = None

    def capture(self):
        return STATE

    def restore(self, state) -> None:
        self.restored = state


@pytest.fixture
def parcel():
    fd = os.memfd_create("parcel")
    yield fd
    os.close(fd)


def test_a_state_is_taken_as_it_was_given(parcel):
    training = Training()
    handing.give(training, Also(), parcel)
    assert os.fstat(parcel).st_size < STATE["weights"].nbytes + 4096, "what was allocated and not needed is given back"
    handing.take(training, Also(), parcel)
    assert training.restored["step"] == 7 and np.array_equal(training.restored["weights"], STATE["weights"])


def test_a_state_for_which_there_is_no_memory_is_refused_before_anything_is_written(parcel):
    with pytest.raises(OutOfMemory, match=r"MB of memory for it cannot be had, 1 MB are free"):
        handing.give(Training(), Also(), parcel, available=lambda: 2**20)
    assert os.fstat(parcel).st_size == 0


def test_memory_that_the_system_refuses_is_an_error_and_no_signal(parcel, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        handing.give(Training(), Also(), parcel)
