"""State that a prepared module keeps beside its parameters and buffers: each replica's own, so it is refused.

A module may keep what it computes from its input: a map of attention, a cache of positions. A second run on the same
samples leaves that as it is. A counter or a moving average becomes another one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from duoka.frameworks.torch.function.side_effects import has_attributes, own_attributes

_DEPTH, _MOST_ITEMS = 2, 64
_MOST_NUMBERS = 1 << 22  # of a tensor that is looked at: a larger one is data
_CLOSE = 1e-5  # relative to the largest number: some kernels of GPUs do not repeat their bits


def find_carried(run: Callable[[], Any], models: Sequence[nn.Module]) -> list[str]:
    """Return names of attributes in which a run leaves something for the next one. `run` does the same each time."""
    run()
    first = dict(_read(models))
    run()
    second = dict(_read(models))
    return [name for name in second if name not in first or not _is_equal(first[name], second[name])]


def _read(models: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    for model in models:
        for path, module in model.named_modules(prefix=type(model).__name__):
            for key, value in own_attributes(module):
                yield from _copy(f"{path}.{key}", value, _DEPTH)


def _copy(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        is_parameter = isinstance(value, nn.Parameter)
        if value.layout is torch.strided and value.numel() <= _MOST_NUMBERS and not is_parameter:
            yield name, value.detach().clone()
    elif isinstance(value, np.ndarray):
        if value.dtype != object and value.size <= _MOST_NUMBERS:
            yield name, value.copy()
    elif isinstance(value, torch.Generator):
        yield name, value.get_state()
    elif isinstance(value, np.random.Generator):
        yield name, repr(value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        yield name, repr(value.get_state(legacy=False))
    elif isinstance(value, random.Random):
        yield name, value.getstate()
    elif value is None or isinstance(value, bool | int | float | complex):
        yield name, value
    elif isinstance(value, tuple | list | deque | dict | set):
        yield f"len({name})", len(value)
        if depth and not isinstance(value, set):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, part in itertools.islice(list(items), _MOST_ITEMS):
                yield from _copy(f"{name}[{key!r}]", part, depth - 1)
    elif depth and has_attributes(value):
        for key, part in list(vars(value).items()):
            yield from _copy(f"{name}.{key}", part, depth - 1)


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
            return False
        if not first.is_floating_point():
            return torch.equal(first, second)
        largest = first[first.isfinite()].abs().max().item() if first.isfinite().any() else 0.0
        return torch.allclose(first, second, rtol=0.0, atol=_CLOSE * largest, equal_nan=True)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.dtype == second.dtype and first.tobytes() == second.tobytes()
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=_CLOSE) or first != first
    return type(first) is type(second) and bool(first == second)
