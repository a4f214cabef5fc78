"""`strategy.sum`, `.mean` and `.gather` between steps: numbers that workers have counted, known to all of them.

Nobody can compute again what a lost worker had counted. With checkpoints, all workers go back to the last one, and
count once more. Without, the run goes on without it, the same on all survivors, and says so each time: a number for the
user's eyes is no reason to end a training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array, check_alike, check_weights
from duoka.collectives.collective import Collective
from duoka.collectives.survivors import add_up, gather
from duoka.collectives.transfer import pack_array, unpack_array
from duoka.errors import MismatchError, WorkerLost


class OverReplicas:
    def __init__(self, collective: Collective, tell: Callable[[str], None], *, can_go_back: bool = False) -> None:
        self._collective, self._tell, self._can_go_back = collective, tell, can_go_back

    def sum(self, values: Sequence[Array], *, is_list: bool) -> Array:
        """One value for all replicas of this worker, or with `is_list` one for each."""
        replicas = self._replicas_for(values, is_list)
        like = check_alike(values)
        given = dict.fromkeys(replicas, np.zeros_like(like)) | dict(zip(replicas, values, strict=False))
        known = add_up(self._collective, given, dict.fromkeys(replicas), is_mean=False)
        self._tell_lost("strategy.sum", known.lost)
        return known.value

    def mean(self, values: Sequence[Array], counts: Sequence[float] | None, *, is_list: bool) -> Array:
        replicas = self._replicas_for(values, is_list)
        like = check_alike(values)
        if counts is None:
            counts = [1.0] * len(replicas) if is_list else [float(len(replicas))]
        elif is_list:
            self._check_number(counts, "counts", replicas)
        weights = dict.fromkeys(replicas, 0.0) | dict(zip(replicas, check_weights(counts), strict=False))
        given = dict.fromkeys(replicas, like) | dict(zip(replicas, values, strict=False))
        known = add_up(self._collective, given, weights, is_mean=True)
        self._tell_lost("strategy.mean", known.lost)
        return known.value

    def gather(self, carried: Sequence[tuple[str, Array]]) -> list[tuple[str, Array]]:
        """Every replica's kind and array, in order, from one for each replica of this worker."""
        replicas = self._replicas_for(carried, is_list=True)
        packed = [kind.encode() + b"\n" + pack_array(array) for kind, array in carried]
        values = dict(zip(replicas, packed, strict=True))
        found = gather(self._collective, values, "of values")
        self._tell_lost("strategy.gather", [replica for replica, data in enumerate(found) if data is None])
        pairs = [data.split(b"\n", 1) for data in found if data is not None]
        return [(kind.decode(), unpack_array(array)) for kind, array in pairs]

    def _replicas_for(self, values: Sequence[Any], is_list: bool) -> tuple[int, ...]:
        own = self._collective.own_replicas
        if not is_list or len(values) == len(own):
            return own
        # A list may have been made before or after this worker has inherited replicas.
        self._check_number(values, "values", self._collective.replicas)
        return self._collective.replicas

    def _check_number(self, values: Sequence[Any], what: str, replicas: Sequence[int]) -> None:
        if len(values) != len(replicas):
            raise MismatchError(
                f"{len(values)} {what} for the {len(replicas)} replicas of worker {self._collective.worker}.",
                do="give one for each replica that this worker runs, in order (strategy.local_replicas).",
            )

    def _tell_lost(self, call: str, lost: Sequence[int]) -> None:
        if not lost:
            return
        replicas = f"replica{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
        if self._can_go_back:
            raise WorkerLost(
                f"{call} misses {replicas}: lost with a worker before its value came.",
                why="nobody else has it, and what follows may depend on it.",
                do="nothing, where the log says that all workers restart; strategy.evaluate loses nothing.",
            )
        self._tell(
            f"{call} goes without {replicas}: lost with a worker before its value"
            " came, and nobody else has it (strategy.evaluate loses nothing)"
        )
