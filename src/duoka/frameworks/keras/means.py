"""Whether the gradient of a step is a mean over rows, as replicas take it: rows that come twice do not change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from duoka.collectives.arrays import Array
from duoka.frameworks.exchange.outcome import Slices
from duoka.frameworks.keras.terms import Terms

_DIFFERENCE, _IN_16_BITS = 0.02, 0.1  # more than what rounding does to gradients that should be equal
# Where a step draws random numbers, gradients of few rows differ by themselves: only what is near to 1/2 or 2 is seen.
_LEAST, _MOST = 0.55, 1.4


def may_be_sums(model: Any, terms: Terms) -> bool:
    """Whether somebody other than Keras says what is trained for; known after a run."""
    kind = type(model)
    is_own = any(getattr(kind, name) is not getattr(keras.Model, name) for name in ("train_step", "compute_loss"))
    return is_own or terms.has_own


def take_twice(batch: Any, rows: range) -> Any:
    """These rows of a batch, and once more behind them."""
    places = np.tile(np.arange(rows.start, rows.stop), 2)
    return tree.map_structure(lambda leaf: leaf[places] if len(getattr(leaf, "shape", None) or ()) else leaf, batch)


def say_no_mean(
    model: Any, once: Sequence[Array | Slices], twice: Sequence[Array | Slices], *, is_random: bool
) -> str | None:
    """What is to be said of the gradients of some rows, and of the same rows twice; None where they are means."""
    before, after = _flat(once), _flat(twice)
    size = np.linalg.norm(before)
    times = np.linalg.norm(after) / size if size else np.nan
    if is_random:
        is_seen = not _LEAST <= times <= _MOST
    else:
        is_seen = np.linalg.norm(after - before) > size * (_IN_16_BITS if _has_16_bits(model) else _DIFFERENCE)
    if not np.isfinite(times) or not is_seen:
        return None
    return f"the gradient of {type(model).__name__} is not a mean over rows, as replicas take it: {_explain(times)}"


def _has_16_bits(model: Any) -> bool:
    return any(str(layer.compute_dtype).endswith("float16") for layer in model._flatten_layers())


def _explain(times: float) -> str:
    is_far = not _LEAST <= times <= _MOST
    what = f"the same rows twice {f'make it {times:.1f} times as large' if is_far else 'change it'}"
    if times < _LEAST:
        return (
            f"{what}. A sum for all rows of the batch (reduction='sum', sum_loss) is divided by those of a replica;"
            " take a mean"
        )
    return (
        f"{what}. A sum over rows is told by duoka.keras.sum_loss(...); losses across rows are not those of one device"
    )


def _flat(gradients: Sequence[Array | Slices]) -> Array:
    """Of a table, the sum over what was looked up."""
    parts = [part.values.sum(0) if isinstance(part, Slices) else part for part in gradients]
    return np.concatenate([np.zeros(1), *(np.asarray(part, np.float64).reshape(-1) for part in parts)])
