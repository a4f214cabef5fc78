"""Memory limits and logical devices, given to each framework before user code can start it."""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

from duoka.devices.device import Device
from duoka.runtime.environment import memory_variables
from duoka.runtime.import_hook import after_import
from duoka.runtime.plan import Plan

_FRAMEWORKS = ("torch", "tensorflow", "jax")


def configure_everything(plan: Plan, worker: int, *, is_only_card: bool = True) -> None:
    """Configure each framework the moment it is imported: from then on the script may start it at any line.

    One that has been started already is an error where it would have to be configured.
    """
    device = plan.devices[worker]
    is_limited_card = device.kind == "gpu" and (device.memory_limit_mb is not None or plan.allow_growth is not None)
    if plan.logical_cpus is not None or is_limited_card:
        os.environ.update(memory_variables(plan, worker))
        for name in _FRAMEWORKS:
            _configure_after_import(name, device, plan.logical_cpus, plan.allow_growth, is_only_card, worker == 0)


@cache  # a cell of a notebook may run twice, and the second time a framework has started
def _configure_after_import(
    name: str, device: Device, logical_cpus: int | None, allow_growth: bool | None, is_only_card: bool, is_first: bool
) -> None:
    def configure(module: ModuleType) -> None:
        importlib.import_module(f"duoka.frameworks.{name}.configuring").configure(
            device, logical_cpus, allow_growth=allow_growth, is_only_card=is_only_card, is_first=is_first
        )

    after_import(name, configure)
