from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from duoka.devices.device import Device
from duoka.frameworks.torch.devices import native


def placing(device: Device, *, is_only_card: bool) -> AbstractContextManager[Any]:
    """Where tensors and modules are made that are not told otherwise."""
    return native(device, is_only_card=is_only_card)  # a torch.device is a context of its own
