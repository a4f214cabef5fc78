"""A worker's device as the framework in use writes it, so that scripts can say `tensor.to(strategy.device)`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from duoka.devices.device import Device

_FRAMEWORKS = ("torch",)


def native_device(device: Device, *, is_only_card: bool) -> Any:
    """The framework's own device object once a script has imported it; the Device record before.

    A worker sees its own card only, and so as the first one (`is_only_card`); a process alone sees all of them.
    """
    for name in _FRAMEWORKS:
        if sys.modules.get(name) is not None:
            return importlib.import_module(f"duoka.frameworks.{name}.devices").native(device, is_only_card=is_only_card)
    return device
