"""What the frameworks a script has already imported know about devices; none is imported for it."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterable

from duoka.devices.device import Device

ASKED = ("torch", "tensorflow", "jax")


def list_logical_devices(kinds: Iterable[str]) -> list[Device]:
    """What TensorFlow has been told to make of one device; other frameworks do not divide theirs."""
    if sys.modules.get("tensorflow") is None:
        return []
    count = importlib.import_module("duoka.frameworks.tensorflow.devices").count_logical_devices
    return [Device(kind, index) for kind in kinds for index in range(count(kind))]


def list_extra_devices() -> list[Device]:
    """Devices seen by the frameworks that are loaded; doubles are left in, the probe sorts them out."""
    found: list[Device] = []
    for framework in ASKED:
        if sys.modules.get(framework) is None:
            continue
        try:
            found += importlib.import_module(f"duoka.frameworks.{framework}.devices").list_devices()
        except Exception as error:  # A broken driver of a device nobody asked for must not stop a run.
            warnings.warn(f"{framework} could not list its devices: {error}", RuntimeWarning, stacklevel=2)
    return found
