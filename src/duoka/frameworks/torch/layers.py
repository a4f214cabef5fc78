"""Layers that make one replica differ from several: dropout, and BatchNorm in training mode. For `duoka rehearse`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

_DROPOUT = nn.modules.dropout._DropoutNd
_BATCHNORM = nn.modules.batchnorm._BatchNorm


class Layers:
    """The layers of some models. Dropout is `p` of dropout layers, and a number named `dropout` of any other layer."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models

    def has_dropout(self) -> bool:
        return any(True for _ in self._dropouts())

    def has_batchnorm(self) -> bool:
        return any(layer.training for layer in self._batchnorms())

    def switch_off_dropout(self) -> None:
        for layer, name in self._dropouts():
            setattr(layer, name, 0.0)

    def hold_batchnorm(self) -> None:
        """Layers are put into eval mode before each forward, because scripts call `model.train()` in every epoch."""
        for layer in self._batchnorms():
            if _hold not in layer._forward_pre_hooks.values():
                layer.register_forward_pre_hook(_hold)

    def _dropouts(self) -> Iterator[tuple[nn.Module, str]]:
        for layer in self._layers():
            name = "p" if isinstance(layer, _DROPOUT) else "dropout"
            if isinstance(found := vars(layer).get(name), float | int) and found:
                yield layer, name

    def _batchnorms(self) -> Iterator[nn.Module]:
        return (layer for layer in self._layers() if isinstance(layer, _BATCHNORM))

    def _layers(self) -> Iterator[nn.Module]:
        return (layer for model in self._models for layer in model.modules())


def _hold(layer: nn.Module, args: Any) -> None:
    layer.training = False
