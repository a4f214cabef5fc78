"""What one replica's run of the training step leaves behind, as arrays; and, added up, what all of them do."""

from __future__ import annotations

from dataclasses import dataclass, field

from duoka.collectives.arrays import Array


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
