"""Parameters whose gradients are sparse: rows of an embedding table."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def sparse_parameters(models: Iterable[nn.Module]) -> set[int]:
    """The ids of tables that were made with sparse=True. Their p.grad stays sparse, as SparseAdam wants it."""
    return {
        id(module.weight)
        for model in models
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
