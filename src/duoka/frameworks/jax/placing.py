from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax._src import xla_bridge


def placing(kind: str, index: int) -> AbstractContextManager[Any] | None:
    """None for what JAX does not see."""
    if not xla_bridge.backends_are_initialized():  # JAX has no public way to ask
        if kind == "cpu":
            return jax.default_device("cpu")
        if not _is_in_use():
            return nullcontext()
    try:
        devices = jax.local_devices(backend=kind)
    except RuntimeError:  # no such backend
        return None
    if kind == "cpu":
        return jax.default_device(devices[min(index, len(devices) - 1)])
    return jax.default_device(devices[index]) if index < len(devices) else None


def _is_in_use() -> bool:
    """Whether JAX, which is imported, is what computes here. Only then it is started: it takes most of a card."""
    keras = sys.modules.get("keras")
    if keras is not None:
        return bool(keras.backend.backend() == "jax")
    return not {"torch", "tensorflow"} & set(sys.modules)
