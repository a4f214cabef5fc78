"""The course of a model's batches: replica after replica, or, when the step turns out to need it, whole shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from duoka.frameworks.keras.backend import Backend
from duoka.frameworks.keras.recorder import NeedsWholeShares
from duoka.frameworks.keras.seeds_of_replicas import global_seed_variable
from duoka.frameworks.keras.steps import Steps
from duoka.frameworks.keras.whole_share import WholeShareSteps

MakeWhole = Callable[[str], WholeShareSteps]


class Course:
    """All workers find out at the same batch, from the first of their replicas, before anything is exchanged."""

    def __init__(self, model: Any, steps: Steps, backend: Backend, make_whole: MakeWhole, reason: str | None) -> None:
        self._model, self._steps, self._backend, self._make_whole = model, steps, backend, make_whole
        self._reason = reason  # why whole shares are needed, where that is known from the start
        self._whole: WholeShareSteps | None = None
        self._is_checked = False

    @property
    def state(self) -> Any:
        return self._backend.state if self._whole is None else self._whole.state

    def run(self, batch: Any, state: Any = None) -> dict[str, Any]:
        if self._whole is None and self._reason is not None:
            self._whole = self._make_whole(self._reason)
        if self._whole is not None:
            return self._whole.run(batch, state)
        values = self._values()
        try:
            self._check(batch, state)
            return self._steps.run(batch, state)
        except NeedsWholeShares as needed:
            self._reason = str(needed)
        for variable, value in values:
            variable.assign(value)
        return self.run(batch, state)

    def _check(self, batch: Any, state: Any) -> None:
        if not self._is_checked and keras.backend.backend() == "jax" and len(state) == 4:
            from duoka.frameworks.keras.after_applying import check

            check(self._model, state, batch)
        self._is_checked = True

    def _values(self) -> list[tuple[Any, Any]]:
        """Where a step runs line by line and is left in its middle, what it has changed until then."""
        if keras.backend.backend() != "tensorflow" or not self._model.run_eagerly:
            return []
        variables = [*self._model.variables, *self._model.metrics_variables, global_seed_variable()]
        return [(variable, keras.ops.convert_to_numpy(variable.value)) for variable in variables]
