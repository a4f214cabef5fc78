from __future__ import annotations

import jax.numpy as jnp


def start() -> None:
    """Make the backend and its thread pools come up."""
    (jnp.ones((64, 64)) @ jnp.ones((64, 64))).sum().block_until_ready()
