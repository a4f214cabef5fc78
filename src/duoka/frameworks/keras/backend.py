"""The contract of a backend: run the step of one replica without a trace, and apply what all have added up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import keras

from duoka.collectives.arrays import Array
from duoka.frameworks.exchange.outcome import Outcome, Total
from duoka.frameworks.keras.learning_rate import rate_of
from duoka.frameworks.keras.logs import Logs


class Backend(ABC):
    """The training step, or the test step, of one compiled model on TensorFlow, JAX or PyTorch."""

    @abstractmethod
    def begin_batch(self, number: int, state: Any = None) -> None:
        """A global batch begins, from the weights and the state that the model has now.

        What replicas draw from global generators follows from the number.
        """

    @abstractmethod
    def compute(self, rows: Any, replica: int, factors: Array) -> Outcome:
        """Run the step on these rows (factors: see terms.py). The model stays as it is, so that it can be run again."""

    @abstractmethod
    def count(self, rows: Any, replica: int) -> Array:
        """The denominators of the loss terms on these rows (see terms.py); nothing else is kept of this run."""

    @abstractmethod
    def apply(self, total: Total) -> dict[str, Any]:
        """Take over the merged state, apply the gradients, if any, once, and give the logs of the global batch."""

    @property
    @abstractmethod
    def state(self) -> Any:
        """What `fit` hands from one batch to the next: JAX's tuple; None where variables keep it."""

    def read(self, batch: Any) -> Any:
        """A global batch, in the form in which this backend cuts it up."""
        return batch

    @abstractmethod
    def cut(self, batch: Any, rows: range) -> Any:
        """These rows of a global batch."""

    def name_metrics(self, positions: Sequence[int]) -> str:
        """The metrics whose variables are at these places of `metrics_variables`."""
        wanted = {id(self.model.metrics_variables[position]) for position in positions}
        return ", ".join(metric.name for metric in self._metrics() if wanted & {id(each) for each in metric.variables})

    def find_doubtful_metrics(self) -> list[int]:
        """Places of the variables of metrics that may count batches: the user's own, and sums of any numbers."""
        doubtful = [metric for metric in self._metrics() if _is_doubtful(type(metric))]
        ids = {id(variable) for metric in doubtful for variable in metric.variables}
        return [n for n, variable in enumerate(self.model.metrics_variables) if id(variable) in ids]

    def _metrics(self) -> list[Any]:
        metrics = list(self.model.metrics)
        for metric in metrics:
            metrics += getattr(metric, "metrics", [])  # those given to `compile` hide in one
        return [metric for metric in metrics if not getattr(metric, "metrics", None)]

    def name_unknown_state(self) -> str:
        """State of floats that the step changes, and that is not known to be a moving mean; known after a run."""
        layers = [layer for layer in self.model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
        known = {id(variable) for layer in layers for variable in layer.variables}
        return ", ".join(variable.path for variable in self.moving if id(variable) not in known)

    @property
    def is_random(self) -> bool:
        """Whether the step draws random numbers; known after a run."""
        seeds = {id(seed) for seed in self.seeds}
        return any(id(variable) in seeds for variable in self.others)

    @property
    def own_logs(self) -> list[str]:
        """The names of numbers that a step reports and that no metric keeps; known after a run."""
        return self._logs.own

    @property
    def rate(self) -> Any:
        """The variable of the learning rate; None where a schedule makes it, or nothing is trained."""
        return rate_of(self.model.optimizer) if self.is_training else None

    @property
    def programs(self) -> Sequence[str]:
        """The parts of a step that run as one compiled program each."""
        return ["train_step"] if self.model.jit_compile and not self.model.run_eagerly else []

    model: Any
    _logs: Logs
    is_repeatable = True  # whether a step that is run again on the same rows gives the same
    is_training: bool
    moving: list[Any]  # the variables that the step has changed: of floats,
    others: list[Any]  # and all others; known once something was computed
    seeds: list[Any]  # the states of seed generators, which differ between replicas


def _is_doubtful(kind: type) -> bool:
    return kind is keras.metrics.Sum or not kind.__module__.startswith("keras.")
