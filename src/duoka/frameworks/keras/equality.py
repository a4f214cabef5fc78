"""Weights that have drifted apart: workers compare digests of them now and then, and the first that differs is named.

What steps do keeps them equal. A callback, the script, or a step that writes behind Keras's back may not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.errors import MismatchError, ReplicasDiffer
from duoka.frameworks.exchange.agreement import hear_all
from duoka.frameworks.keras.seeds_of_replicas import seed_variables
from duoka.frameworks.keras.start import read_value

_EVERY = 16  # calls of train_on_batch, and more often at first: only `fit` has epochs


class Equality:
    """Of one model's weights and other state, without seeds. The optimizer's slots show in the weights."""

    def __init__(self, model: Any, collective: Collective, check: Callable[[], None]) -> None:
        """`check` names and heals a worker that has drifted, where the others are a majority."""
        self._model, self._collective, self._check = model, collective, check
        self._num_calls = 0
        self._digests = np.empty(0, np.uint32)

    def begin(self) -> None:
        """All workers have just been given the same variables."""
        self._num_calls = 0

    def see_batch(self, state: Any, num_fitted: int | None) -> None:
        """After a batch; the first one shows whether the step keeps weights equal. For `state` see `note`.

        `num_fitted` are those of the `fit` under way, if it is one, since workers have compared their weights.
        """
        is_fitting = num_fitted is not None
        self._num_calls = self._num_calls + 1 if num_fitted is None else num_fitted
        if len(self._collective.workers) > 1 and _is_due(self._num_calls, is_fitting=is_fitting):
            when = f"after batch {self._num_calls} of a training"
            self.compare(hear_all(self._collective, self.note(state), f"of the weights {when}"), when)

    def note(self, state: Any = None) -> bytes:
        """A digest for all of them. `state` is JAX's tuple, which has the values while variables are empty."""
        lists = [self._model.trainable_variables, self._model.non_trainable_variables]
        values = state[:2] if state is not None else [[variable.value for variable in each] for each in lists]
        seeds = {id(seed) for seed in seed_variables(self._model)}
        digests = [
            0 if id(variable) in seeds else _digest(read_value(value))
            for variables, given in zip(lists, values, strict=True)
            for variable, value in zip(variables, given, strict=True)
        ]
        self._digests = np.array(digests, np.uint32)
        return zlib.crc32(self._digests.data).to_bytes(4, "little")

    def compare(self, notes: Sequence[bytes], when: str, *, can_remove: bool = False) -> None:
        """All workers call it, with what each replica's worker has noted."""
        if len(set(notes)) == 1:
            return
        if self._collective.juniors or (can_remove and len(self._collective.workers) > 2):
            self._check()
            return
        first, *others = self._collective.all_gather([self._digests] * len(self._collective.replicas))
        owner = self._collective.placement.owner
        for replica, other in enumerate(others, 1):
            if len(other) != len(first):
                raise MismatchError(
                    f"The model has {len(first)} variables on worker {owner(0)}, {len(other)} on worker"
                    f" {owner(replica)}, {when}.",
                    do="let every worker make the same layers.",
                )
            if (other != first).any():
                self._refuse(int(np.argmax(other != first)), owner(0), owner(replica), when)

    def _refuse(self, place: int, first_worker: int, worker: int, when: str) -> None:
        variables = [*self._model.trainable_variables, *self._model.non_trainable_variables]
        raise ReplicasDiffer(
            f"{variables[place].path} is not the same on workers {first_worker} and {worker}, {when}.",
            why="something has changed it on some workers only, or differently: a callback, the script, or a train_step"
            " that writes to it by itself (torch.optim, tensors in place).",
            do="change weights on every worker, or before fit, which gives the first worker's to all; in a train_step,"
            " let self.optimizer.apply(gradients, variables) do it.",
        )


def _is_due(num_calls: int, *, is_fitting: bool) -> bool:
    if is_fitting:
        return num_calls == 1
    return num_calls % _EVERY == 0 or num_calls in (1, 2, 4, 8)


def _digest(value: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
