"""Keras 3 on TensorFlow, JAX or PyTorch."""

from __future__ import annotations

try:
    import keras as keras
except ImportError as error:
    import os

    from duoka.errors import LaunchError

    raise LaunchError(
        "Keras cannot be imported.",
        why=f"KERAS_BACKEND is {os.environ.get('KERAS_BACKEND', 'not set')}, and {error}.",
        do="install Keras and the backend, or choose another one: tensorflow, jax or torch.",
    ) from error
