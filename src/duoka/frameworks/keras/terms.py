"""The terms of a loss, and what makes each of them the one-device value when replicas are weighted by their rows.

A replica's gradient is weighted n_r / n. That is right for terms that are means over rows. A sum over rows has to be
multiplied with n / n_r first. A mean over something else (the steps that no mask hides, the sum of sample weights) is
divided by d_r, which is this replica's own: it has to be multiplied with (d_r / n_r) (n / d), d being the sum of all
d_r, which replicas exchange before they compute gradients.

A loss that gives one number for all of its rows has no denominator to be seen: it counts as a mean over rows. One that
is not reduced is left to whoever reduces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from keras import ops
from keras.layers import Layer
from keras.src.losses import loss as loss_module

from duoka.collectives.arrays import Array
from duoka.errors import MismatchError
from duoka.frameworks.switching import switching

MOST_TERMS = 62
MOST_FACTORS = MOST_TERMS + 2  # one for each term, and:
START = -2  # what the variables of metrics begin with: 0, except to find out whether they are sums
ROWS = -1  # n / n_r, which makes up for the weight of a replica

_rows_factor: Any = None  # of the step that is being run or traced
MEAN, SUM, COUNTED = "mean", "sum", "counted"


class Terms:
    """Watches the losses that a step computes: each call of a Keras loss is a term, in the order of calls."""

    def __init__(self) -> None:
        self.kinds: list[str] = []  # of the last run or tracing
        self.denominators: list[Any] = []
        self.single_numbers: dict[str, None] = {}  # the names of losses that give one number for a batch
        self.has_own = False  # losses that are not Keras's

    @property
    def are_counted(self) -> bool:
        """Whether denominators have to be exchanged before gradients are computed."""
        return COUNTED in self.kinds

    @property
    def are_means(self) -> bool:
        """Whether all terms are plain means over rows, which need no correction."""
        return set(self.kinds) <= {MEAN}

    @contextmanager
    def watching(self, factors: Any) -> Iterator[None]:
        """Multiply each term with its correction, except plain means, whose correction is 1."""
        global _rows_factor
        self.kinds, self.denominators = [], []
        _rows_factor = factors[ROWS]
        called: list[Any] = []

        def add_seen(add: Callable[..., None], layer: Any, loss: Any) -> None:
            self.has_own |= not _is_of_keras(type(layer))
            add(layer, loss)

        def call_seen(call: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
            self.has_own |= not _is_of_keras(getattr(loss, "fn", type(loss)))
            called.append(loss)
            try:
                return call(loss, *args, **kwargs)
            finally:
                called.pop()

        def corrected(
            reduce: Callable[..., Any],
            values: Any,
            sample_weight: Any = None,
            mask: Any = None,
            reduction: Any = "sum_over_batch_size",
            dtype: Any = None,
        ) -> Any:
            number, kind = len(self.kinds), _kind(values, sample_weight, mask, reduction)
            if number == MOST_TERMS:
                raise MismatchError(f"A training step computes more than {MOST_TERMS} losses.")
            if _is_one_number(values) and called:
                self.single_numbers[called[-1].name] = None
            self.kinds.append(kind)
            self.denominators.append(_denominator(values, sample_weight, mask, reduction) if kind == COUNTED else 1.0)
            term = reduce(values, sample_weight, mask, reduction, dtype)
            return term if kind == MEAN else term * ops.cast(factors[number], term.dtype)

        switched = [
            (loss_module, "reduce_weighted_values", corrected),
            (loss_module.Loss, "__call__", call_seen),
            (Layer, "add_loss", add_seen),
        ]
        try:
            with switching(switched):
                yield
        finally:
            _rows_factor = None

    def name_single_numbers(self, tell: Callable[[str], None]) -> None:
        for name in self.single_numbers:
            tell(f"the loss {name} gives one number for a batch: it counts as a mean over rows, exact where it is one")

    def factors(self, num_rows: int, total_rows: int, own: Array | None, total: Array | None) -> Array:
        """For each term; `own` and `total` are denominators, where they were exchanged."""
        factors = np.ones(MOST_FACTORS, np.float32)
        factors[START], factors[ROWS] = 0, total_rows / num_rows
        for number, kind in enumerate(self.kinds):
            if kind == SUM:
                factors[number] = total_rows / num_rows
            elif kind == COUNTED and own is not None and total is not None and total[number]:
                factors[number] = (own[number] / num_rows) * (total_rows / total[number])
        return factors


def sum_loss(value: Any) -> Any:
    """For `add_loss`: a sum over the rows of a batch, not a mean. It gets the weight of one device on each replica."""
    return value if _rows_factor is None else value * ops.cast(_rows_factor, value.dtype)


def _is_of_keras(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("keras.")


def _is_one_number(values: Any) -> bool:
    return not len(getattr(values, "shape", ()))


def _kind(values: Any, sample_weight: Any, mask: Any, reduction: Any) -> str:
    if reduction in ("none", None):
        return MEAN
    if _is_one_number(values):
        # With a weight or a mask for each row, Keras adds up one product for each of them.
        has_products = mask is not None or not _is_one_number(sample_weight)
        return SUM if reduction == "sum" and has_products else MEAN
    if reduction == "sum":
        return SUM
    if mask is not None or (reduction == "mean_with_sample_weight" and sample_weight is not None):
        return COUNTED
    return MEAN


def _denominator(values: Any, sample_weight: Any, mask: Any, reduction: Any) -> Any:
    """What Keras divides by, see `reduce_weighted_values`."""
    if reduction != "mean_with_sample_weight":
        return ops.sum(ops.cast(mask, "float32"))
    weight = loss_module.apply_mask(sample_weight, mask, values.dtype, reduction)
    _, weight = loss_module.squeeze_or_expand_to_same_rank(values, ops.cast(weight, values.dtype))
    return ops.cast(ops.sum(weight), "float32")
