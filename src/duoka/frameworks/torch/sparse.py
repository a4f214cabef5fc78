"""Parameters whose gradients are sparse: rows of an embedding table."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def sparse_parameters(models: Iterable[nn.Module]) -> set[int]:
    """The ids of tables that were made with sparse=True. Their p.grad stays sparse, as SparseAdam wants it."""
    return {
        id(module.weight)
        for model in models
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }


def write_sparse(gradient: torch.Tensor, weight: float, slot: torch.Tensor, touched: torch.Tensor | None) -> None:
    """Write a sparse gradient into its slot; a mask beside it says which rows were touched, if only by zeros."""
    slot.zero_()
    if touched is not None:
        touched.zero_()
    if weight == 0:
        return
    gradient = gradient.coalesce()
    rows = gradient.indices()[0]
    slot[rows] = gradient.values().to(slot.dtype) * weight
    if touched is not None:
        touched[rows] = 1


def as_sparse(dense: torch.Tensor, touched: torch.Tensor) -> torch.Tensor:
    """The touched rows of a sum, as p.grad shows them."""
    rows = touched.nonzero().reshape(1, -1)
    return torch.sparse_coo_tensor(rows, dense[rows[0]], dense.shape, is_coalesced=True, check_invariants=False)
