"""The contract of a backend in whole-share mode: the step runs as it is written, on all rows of this worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras

from duoka.collectives.arrays import Array
from duoka.frameworks.exchange.outcome import Outcome
from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.keras.applying import Applying
from duoka.frameworks.keras.assignments import watching_assignments
from duoka.frameworks.keras.corrections import Corrections
from duoka.frameworks.keras.given import list_optimizers
from duoka.frameworks.keras.host import Host
from duoka.frameworks.keras.learning_rate import rate_of
from duoka.frameworks.keras.logs import Logs
from duoka.frameworks.keras.refusals import refuse_own_optimizers
from duoka.frameworks.keras.sync_batchnorm import synchronising
from duoka.frameworks.keras.terms import Terms
from duoka.frameworks.keras.trackers import tracking


class ShareBackend(ABC):
    def __init__(self, model: Any, wire: Wire, host: Host, tell: Any, *, sync_batchnorm: bool) -> None:
        self._model, self._wire, self._host, self._tell = model, wire, host, tell
        self._sync_batchnorm = sync_batchnorm
        self._terms = Terms()
        self._changed: dict[int, Any] = {}  # variables that the step itself assigns to, in this order
        self._updated: set[int] = set()  # ids of variables of metrics that its last run has assigned to
        self._logs = Logs(model, tell)

    @abstractmethod
    def begin_batch(self, number: int, state: Any = None) -> None:
        """A global batch begins, from the weights and the state that the model has now."""

    @abstractmethod
    def compute(self, rows: Any, replica: int, factor: float) -> Outcome:
        """Run the step. Weights are trained when this returns; the outcome has no gradients.

        Random numbers are those of this replica; the factor is n / n_r.
        """

    @abstractmethod
    def apply(self, moving: dict[int, Array], others: dict[int, Array], total: Outcome) -> dict[str, Any]:
        """Take over state that is not the same on all workers, by its place in the outcome; give the logs."""

    @property
    @abstractmethod
    def state(self) -> Any:
        """What `fit` hands from one batch to the next: JAX's tuple; None where variables keep it."""

    def learning_rate(self) -> float | None:
        """The optimizer's, when it is a number that callbacks may change."""
        rate = rate_of(self._model.optimizer)
        return None if rate is None else float(keras.ops.convert_to_numpy(rate.value))

    def read(self, batch: Any) -> Any:
        """A global batch, in the form in which this backend cuts it up."""
        return batch

    @abstractmethod
    def cut(self, batch: Any, rows: range) -> Any:
        """These rows of a global batch."""

    @contextmanager
    def _exchanging(self, factor: Any) -> Iterator[None]:
        """Around one run, or one tracing, of the step."""
        applying = Applying(self._exchange, list_optimizers(self._model))
        corrections = Corrections(self._terms, factor, self._ask_correction)
        synchronised: AbstractContextManager[None] = (
            nullcontext()
            if self._wire.is_alone
            else synchronising(self._host, self._wire, all_layers=self._sync_batchnorm)
        )
        with (
            applying.watching(),
            self._watching_changes(applying),
            self._terms.watching(corrections),
            tracking(factor),
            self._logs.watching(),
            synchronised,
        ):
            before = self._mark_weights()
            yield
        self._terms.name_single_numbers(self._tell)
        if not applying.has_applied and self._mark_weights() != before:
            refuse_own_optimizers(self._model)

    def _mark_weights(self) -> Any:
        """Another mark after they were changed. A step that is traced once, and applies nothing, never will."""
        return object()

    @contextmanager
    def _watching_changes(self, applying: Applying) -> Iterator[None]:
        assigned: dict[int, Any] = {}

        def see(variable: Any) -> None:
            if not applying.is_inside:
                assigned[id(variable)] = variable

        with watching_assignments(see):
            yield
        metric_ids = {id(variable) for variable in self._model.metrics_variables}  # some are made by the first run
        self._changed |= {key: variable for key, variable in assigned.items() if key not in metric_ids}
        self._updated = assigned.keys() & metric_ids

    def _ask_correction(self, denominator: Any) -> Any:
        if self._wire.is_alone:
            return 1.0
        denominator = keras.ops.cast(denominator, "float32")
        return self._host.call(lambda own: [self._wire.correct(own)], [denominator], [((), "float32")])[0]

    def _exchange(self, gradients: list[Any]) -> list[Any]:
        """Of an optimizer's `apply`: what all workers' rows say together."""
        if self._wire.is_alone:
            return gradients
        at = [position for position, gradient in enumerate(gradients) if gradient is not None]
        present = [gradients[position] for position in at]
        like = [(tuple(gradient.shape), keras.backend.standardize_dtype(gradient.dtype)) for gradient in present]
        exchanged = self._host.call(self._wire.sum_gradients, present, like)
        result = list(gradients)
        for position, gradient in zip(at, exchanged, strict=True):
            result[position] = gradient
        return result


def bring_back_seeds(before: Sequence[Array], after: Sequence[Array]) -> list[Array]:
    """The model's own seeds, with the counters that the step has moved on: these are the same on all workers."""
    restored = []
    for old, new in zip(before, after, strict=True):
        state = new.copy()
        state[0] = old[0]
        restored.append(state)
    return restored
