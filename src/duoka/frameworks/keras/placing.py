from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras


@contextmanager
def placing() -> Iterator[None]:
    """On PyTorch, Keras has a device of its own, and takes a card wherever there is one: here it is PyTorch's.

    On TensorFlow and JAX it uses theirs, which are set already.
    """
    if keras.backend.backend() != "torch":
        yield
        return
    import torch

    with keras.device(str(torch.get_default_device())):
        yield
