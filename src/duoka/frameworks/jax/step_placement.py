"""Where JAX keeps arrays."""

from __future__ import annotations

from typing import Any

from duoka.frameworks.placement_log import Row


def array_row(name: str, array: Any) -> Row:
    return Row("variable", name, f"{array.dtype} {tuple(array.shape)}", devices_of(array))


def devices_of(array: Any) -> str:
    return ", ".join(sorted(f"{device.platform}:{device.id}" for device in array.devices()))
