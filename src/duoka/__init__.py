"""Duoka (多卡, "many cards"): train the model you already have on every device you have.

Importing this loads no framework, starts no thread and reads no environment variable:
every public name is loaded on first touch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duoka.devices.device import Device as Device
    from duoka.errors import DuokaError as DuokaError
    from duoka.here import device as device
    from duoka.here import devices as devices
    from duoka.here import virtual_devices as virtual_devices
    from duoka.session import Mirrored as Mirrored

__version__ = "0.1.0"

try:
    # Where the process started: a script may go elsewhere before it makes its strategy, and its workers start anew.
    START_DIRECTORY = os.getcwd()
except FileNotFoundError:
    START_DIRECTORY = "/"

_HOMES = {
    "Device": "duoka.devices.device",
    "DuokaError": "duoka.errors",
    "Mirrored": "duoka.session",
    "device": "duoka.here",
    "devices": "duoka.here",
    "virtual_devices": "duoka.here",
}

_MODULES = {"keras", "tensorflow", "torch"}  # names borrowed from a framework: loaded on first touch

__all__ = ["Device", "DuokaError", "Mirrored", "device", "devices", "virtual_devices"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"duoka.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'duoka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
