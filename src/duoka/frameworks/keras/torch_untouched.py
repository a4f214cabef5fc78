"""Finds out, at the first batch, what a step on PyTorch changes behind Keras's back: tensors written in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from duoka.errors import MismatchError
from duoka.frameworks.keras.recorder import NeedsWholeShares, Recorder


@contextmanager
def watching_writes(model: Any, recorder: Recorder) -> Iterator[None]:
    """PyTorch counts the writes to each tensor. Those that went through Keras are known to the recorder."""
    variables, buffers = list(model.variables), dict(_buffers(model))
    versions = [variable.value._version for variable in variables]
    buffer_versions = {name: buffer._version for name, buffer in buffers.items()}
    yield
    if foreign := [name for name, buffer in buffers.items() if buffer._version != buffer_versions[name]]:
        raise MismatchError(
            f"The step changes {', '.join(foreign[:5])}, which belongs to a PyTorch module inside the model.",
            why="replicas merge the state of Keras layers; that of other modules would differ between workers.",
            do="use a Keras layer in its place (keras.layers.BatchNormalization), or one replica.",
        )
    known = recorder.changed.keys() | recorder.counted
    for variable, version in zip(variables, versions, strict=True):
        if variable.value._version != version and id(variable) not in known:
            raise NeedsWholeShares(f"it writes to {variable.path} in place")


def _buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for layer in model._flatten_layers():
        module = layer.__dict__.get("_modules", {}).get("module", layer.__dict__.get("module"))
        if isinstance(module, torch.nn.Module):
            for name, buffer in module.named_buffers():
                yield f"{layer.name}.{name}", buffer
