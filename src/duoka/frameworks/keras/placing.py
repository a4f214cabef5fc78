from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras

from duoka.devices.device import Device


@contextmanager
def placing(device: Device, *, is_only_card: bool) -> Iterator[None]:
    """On PyTorch, Keras has a device of its own, and chooses a card wherever there is one.

    On TensorFlow and JAX it uses theirs, which are set already.
    """
    if keras.backend.backend() != "torch":
        yield
        return
    index = 0 if is_only_card else device.index
    with keras.device("cpu" if device.kind == "cpu" else f"{device.kind}:{index}"):
        yield
