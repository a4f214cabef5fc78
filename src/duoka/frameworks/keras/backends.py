"""Which classes run the steps on which backend of Keras. A backend's modules are loaded where it is the one in use."""

from __future__ import annotations

import importlib
from typing import Any

import keras

BACKENDS = {
    "tensorflow": ("tensorflow_backend.TensorFlowBackend", "whole_share_tensorflow.TensorFlowShare"),
    "jax": ("jax_backend.JaxBackend", "whole_share_jax.JaxShare"),
    "torch": ("torch_backend.TorchBackend", "whole_share_torch.TorchShare"),
}


def load_backend() -> Any:
    """The `Backend` that runs replica after replica."""
    return _load(BACKENDS[keras.backend.backend()][0])


def load_share_backend() -> Any:
    """The `ShareBackend` that runs a worker's whole share."""
    return _load(BACKENDS[keras.backend.backend()][1])


def load_restarting() -> Any:
    """What is known of tf.data datasets. TensorFlow is loaded: there is one."""
    return importlib.import_module("duoka.frameworks.keras.restarting")


def load_draws() -> Any:
    """What tf.data datasets draw. TensorFlow is loaded: there is one."""
    return importlib.import_module("duoka.frameworks.keras.draws")


def _load(name: str) -> Any:
    module, _, kind = name.partition(".")
    return getattr(importlib.import_module(f"duoka.frameworks.keras.{module}"), kind)
