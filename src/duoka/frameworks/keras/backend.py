"""The contract of a backend: run the step of one replica without a trace, and apply what all have added up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from duoka.collectives.arrays import Array
from duoka.frameworks.keras.outcome import Outcome


class Backend(ABC):
    """The training step, or the test step, of one compiled model on TensorFlow, JAX or PyTorch."""

    @abstractmethod
    def begin_batch(self, number: int, state: Any = None) -> None:
        """A global batch begins, from the weights and the state that the model has now.

        What replicas draw from global generators follows from the number.
        """

    @abstractmethod
    def compute(self, rows: Any, replica: int, corrections: Array) -> Outcome:
        """Run the step on these rows. The model stays as it is, so that it can be run again."""

    @abstractmethod
    def count(self, rows: Any, replica: int) -> Array:
        """The denominators of the loss terms on these rows (see terms.py); nothing else is kept of this run."""

    @abstractmethod
    def apply(self, total: Outcome) -> dict[str, Any]:
        """Take over the merged state, apply the gradients, if any, once, and give the logs of the global batch."""

    @property
    @abstractmethod
    def state(self) -> Any:
        """What `fit` hands from one batch to the next: JAX's tuple; None where variables keep it."""

    @abstractmethod
    def learning_rate(self) -> float | None:
        """The optimizer's, when it is a number that callbacks may change; None also where nothing is trained."""

    @abstractmethod
    def cut(self, batch: Any, rows: range) -> Any:
        """These rows of a global batch."""

    moving: list[Any]  # the variables that the step has changed: of floats,
    others: list[Any]  # and all others; known once something was computed
    seeds: list[Any]  # the states of seed generators, which differ between replicas
