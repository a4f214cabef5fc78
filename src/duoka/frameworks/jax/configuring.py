"""What JAX takes of a card is said by environment variables, which it reads when its backend starts."""

from __future__ import annotations

from jax._src import xla_bridge

from duoka.devices.device import Device
from duoka.frameworks.too_late import say_no_meaning, too_late


def configure(
    device: Device, logical_cpus: int | None, *, allow_growth: bool | None, is_only_card: bool, is_first: bool
) -> None:
    if logical_cpus is not None and is_first:
        say_no_meaning("JAX", logical_cpus)
    if device.kind == "gpu" and xla_bridge.backends_are_initialized():  # JAX has no public way to ask
        raise too_late("JAX", device, None, allow_growth)
