"""Batches as loaders give them: tensors in tuples, lists and dictionaries, nested at will."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure with every tensor changed; whatever is no tensor stays as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(part, change) for part in value)
    if isinstance(value, Mapping):
        return {key: map_tensors(part, change) for key, part in value.items()}
    return value


def count_rows(value: Any) -> int | None:
    """The size of the first dimension of the first tensor."""
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((rows for part in parts if (rows := count_rows(part)) is not None), None)


def take_rows(value: Any, rows: range) -> Any:
    """These rows of every tensor, and of every list beside them."""
    if isinstance(value, (list, tuple)) and not any(
        isinstance(part, (torch.Tensor, list, tuple, dict)) for part in value
    ):
        return type(value)(value[rows.start : rows.stop])
    return map_tensors(value, lambda tensor: tensor[rows.start : rows.stop] if tensor.dim() else tensor)
