"""What one replica's run of the training step leaves behind, as arrays; and, added up, what all of them do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array, sum_dtype
from duoka.collectives.packing import Packing


@dataclass(frozen=True)
class Slices:
    """A gradient of some rows of a table: TensorFlow's IndexedSlices. Rows may come more than once."""

    indices: Array
    values: Array


@dataclass
class Outcome:
    """The same lists, of the same lengths, for every replica of a step."""

    gradients: list[Array | Slices]  # in the order in which the step handed them to the optimizer, without None
    moving: list[Array]  # state of floats that the step has changed: moving means and variances
    others: list[Array]  # any other state that it has changed: counters, states of seed generators
    metrics: list[Array]  # what it has added to the variables of the metrics
    logs: list[Array] = field(default_factory=list)  # numbers that it reports and that no metric keeps
    rate: float | None = None  # the learning rate, when it is a number that callbacks may change


@dataclass(frozen=True)
class Total:
    """What all replicas did together, in memory of its own: frameworks may keep it without a copy.

    Everything that was added up lies in few flat arrays, so that a compiled function takes them as they are and cuts
    them up itself: many small ones take longer to hand over than to use.
    """

    packing: Packing
    flats: list[Array]  # one for each type
    slices: list[Slices]  # of the gradients that are slices, in their order
    others: list[Array]
    counts: tuple[int, int, int, int]  # of gradients that are not slices, moving, logs, metrics: all in this order

    def parts(self, flats: Sequence[Any], reshape: Any = np.reshape, cast: Any = np.ndarray.astype) -> list[list[Any]]:
        """Gradients that are not slices, moving state, logs and metrics, out of these flat arrays or tensors."""
        views = self.packing.views(flats, reshape)
        own = (
            view if kind.dtype == sum_dtype(kind.dtype) else cast(view, kind.dtype)
            for view, kind in zip(views, self.packing.kinds, strict=True)
        )
        return [[next(own) for _ in range(count)] for count in self.counts]

    @property
    def key(self) -> Any:
        """Equal for totals that the same compiled function can take."""
        return self.packing.kinds, self.counts, len(self.slices), len(self.others)
