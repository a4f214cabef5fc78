"""One `with` for all frameworks: what they make inside, they make on one device."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from duoka.devices.device import Device

_FRAMEWORKS = ("torch", "tensorflow", "jax", "keras")


@contextmanager
def placing(device: Device, *, is_only_card: bool) -> Iterator[None]:
    """Open the own device context of each framework that is imported by now; none is imported for it."""
    with ExitStack() as stack:
        for name in _FRAMEWORKS:
            if sys.modules.get(name) is not None:
                module = importlib.import_module(f"duoka.frameworks.{name}.placing")
                stack.enter_context(module.placing(device, is_only_card=is_only_card))
        yield
