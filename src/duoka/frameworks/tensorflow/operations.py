"""The names of reductions."""

from __future__ import annotations

from typing import Any

from duoka.errors import MismatchError


def read_op(op: Any) -> bool:
    """Whether it is the mean; else it is the sum.

    >>> read_op("mean"), read_op("SUM")
    (True, False)
    """
    name = str(getattr(op, "value", op)).lower()
    if name not in ("sum", "mean"):
        raise MismatchError(f"{op!r} is no reduction.", do='give "sum", "mean", or a tf.distribute.ReduceOp.')
    return name == "mean"
