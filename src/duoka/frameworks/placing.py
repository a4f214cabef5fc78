"""One `with` for all frameworks: what they make inside, they make on one device."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from duoka.devices.device import Device
from duoka.errors import DeviceError

_TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX"}


@contextmanager
def placing(device: Device, *, is_only_card: bool, soft_placement: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Open the own device context of each framework that is imported by now; none is imported for it.

    A framework may be built without support of a device that is here: then it takes the CPU, or it is an error.
    """
    with ExitStack() as stack:
        for name, title in _TITLES.items():
            if sys.modules.get(name) is None:
                continue
            module = importlib.import_module(f"duoka.frameworks.{name}.placing")
            index = 0 if is_only_card and device.kind != "cpu" else device.index
            place = module.placing(device.kind, index)
            if place is None:
                _refuse_or_say(title, device, soft_placement, say)
                place = module.placing("cpu", 0)
            stack.enter_context(place)
        if sys.modules.get("keras") is not None:
            stack.enter_context(importlib.import_module("duoka.frameworks.keras.placing").placing())
        yield


def _refuse_or_say(title: str, device: Device, soft_placement: bool, say: Callable[[str], None]) -> None:
    if not soft_placement:
        raise DeviceError(
            f"{title} does not see {device}.",
            why="it is built for other devices; soft_placement=False forbids the CPU in its place.",
            do=f"install {title} for this device, or leave soft_placement on.",
        )
    say(f"{title} does not see {device}: what it places there runs on the CPU")
