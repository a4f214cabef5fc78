"""Batches as loaders give them: tensors in tuples, lists and dictionaries, nested at will."""

from __future__ import annotations

import dataclasses
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
        return like(value, {key: map_tensors(part, change) for key, part in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: map_tensors(getattr(value, name), change) for name in fields})
    return value


def like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """The same kind of mapping, where it can be made from a dictionary: some have attributes that users ask for."""
    if type(value) is dict:
        return parts
    try:
        return type(value)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts


def count_rows(value: Any) -> int | None:
    """The size of the first dimension of the first tensor."""
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((rows for part in parts if (rows := count_rows(part)) is not None), None)


def take_rows(value: Any, rows: range) -> Any:
    """These rows of every tensor, and of every list beside them."""
    if isinstance(value, torch.Tensor):
        return value[rows.start : rows.stop] if value.dim() else value
    if isinstance(value, Mapping):
        return like(value, {key: take_rows(part, rows) for key, part in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(take_rows(part, rows) for part in value))
    if isinstance(value, (list, tuple)):
        if any(isinstance(part, (torch.Tensor, list, tuple, Mapping)) for part in value):
            return type(value)(take_rows(part, rows) for part in value)
        return type(value)(value[rows.start : rows.stop])
    return value
