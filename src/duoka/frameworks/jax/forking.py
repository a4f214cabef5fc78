from __future__ import annotations

import os

from jax._src import xla_bridge


def why_not_fork() -> str | None:
    if xla_bridge.backends_are_initialized():
        return "JAX has started its backend in this process, and its threads do not survive a fork."
    return None


def pin_one_thread() -> None:
    os.environ["NPROC"] = "1"  # read when the backend starts
