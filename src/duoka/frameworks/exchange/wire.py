"""What a worker exchanges in the middle of a step that runs its whole share of a batch: called out of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.collectives.packing import Packing
from duoka.errors import WorkerLost, keep_inside


class Wire:
    """Arrays in and out, and the rows of the step under way. A worker without rows takes part with a weight of 0."""

    def __init__(self, collective: Collective, *, why_lost: str, do_when_lost: str) -> None:
        """With what is said when a worker is lost."""
        self._collective = collective
        self._why_lost, self._do_when_lost = why_lost, do_when_lost
        self.num_rows = self.total_rows = 0
        self.failure: BaseException | None = None  # what was raised in a call out of a compiled step

    def begin(self, num_rows: int, total_rows: int) -> None:
        self.num_rows, self.total_rows = num_rows, total_rows

    @property
    def weight(self) -> float:
        return self.num_rows / self.total_rows

    @property
    def is_alone(self) -> bool:
        return len(self._collective.workers) == 1

    @property
    def workers(self) -> list[int]:
        """In the order of their rows."""
        placement = self._collective.placement
        return sorted(placement.workers, key=lambda worker: placement.replicas_of(worker)[0])

    def surfacing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Keep what a function raises: frameworks make errors of their own of it, or stop at nothing."""

        def call(*arrays: Any) -> Any:
            try:
                return function(*(np.asarray(array) for array in arrays))
            except BaseException as error:
                self.failure = self.failure or error
                keep_inside(error)
                raise

        return call

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure from None

    # What is called out of a step.

    def sum_gradients(self, *gradients: Array) -> list[Array]:
        return self.add_up(gradients, [self.weight] * len(gradients))

    def gather_slices(self, indices: Array, values: Array) -> list[Array]:
        """One behind the other, in the order of workers, unmerged: optimizers clip and square them as they come."""
        if not self.num_rows:
            indices, values = indices[:0], values[:0]
        weighted = (values * self.weight).astype(values.dtype)
        return [np.concatenate(self.gather(part)) for part in (indices, weighted)]

    def gather_or_add_slices(self, indices: Array, values: Array) -> list[Array]:
        """For slices of which nobody knows whether they are of rows or of positions: distinct ones that all workers
        have are added up.

        Those of rows are like that where all workers look up the same, and each of it once: hardly beyond one row.
        """
        indices, values = self.gather_slices(indices, values)
        num_workers = sum(len(part) > 0 for part in self.gather(np.ones(1 if self.num_rows else 0)))
        if len(indices) % num_workers:
            return [indices, values]
        first, *others = np.split(indices, num_workers)
        is_shared = all(np.array_equal(part, first) for part in others)
        if not is_shared or len(np.unique(first)) < len(first):
            return [indices, values]
        return [first, np.sum(np.split(values, num_workers), axis=0, dtype=values.dtype)]

    def correct(self, denominator: Array) -> Array:
        """The factor of a loss term that is divided by d_r instead of by rows: (d_r / n_r) (n / d).

        With it, and the weight n_r / n of a worker, the term is divided by d, the sum of all d_r.
        """
        own = float(denominator) if self.num_rows else 0.0
        total = float(self.add_up([np.float64(own).reshape(1)], [1.0])[0][0])
        is_corrected = self.num_rows > 0 and total != 0
        return np.float32((own / self.num_rows) * (self.total_rows / total) if is_corrected else 1.0)

    def merge_moments(self, mean: Array, squares: Array, count: Array) -> list[Array]:
        """Mean, variance and count of each channel over all workers, from those of their rows.

        In the order of workers and in 64 bits, so that all get the same bits.
        """
        mine = np.stack([mean, squares, count]).astype(np.float64)
        total_mean, total_squares, total_count = np.zeros_like(mine)
        for part in self.gather(mine if self.num_rows else mine[:0]):
            if len(part):
                shift, together = part[0] - total_mean, np.maximum(total_count + part[2], 1)
                total_squares = total_squares + part[1] + shift**2 * (total_count * part[2] / together)
                total_mean = total_mean + shift * (part[2] / together)
                total_count = total_count + part[2]
        variance = total_squares / np.maximum(total_count, 1)
        return [array.astype(mean.dtype) for array in (total_mean, variance, total_count)]

    def sum_moment_gradients(self, *gradients: Array) -> list[Array]:
        """Each worker's loss depends on everybody's rows. Its gradient will be weighted, so the sum is unweighted."""
        sums = self.add_up(gradients, [self.weight] * len(gradients))
        return [(part / self.weight if self.num_rows else part * 0).astype(part.dtype) for part in sums]

    # What it is made of.

    def add_up(self, arrays: Sequence[Array], weights: Sequence[float]) -> list[Array]:
        """The sums over workers, the same bits on all of them. What has a weight of 0 is left out."""
        packing = Packing.of(arrays)
        flats = [np.zeros(count, dtype) for dtype, count in packing.sizes.items()]
        for view, array, weight in zip(packing.views(flats), arrays, weights, strict=True):
            if weight == 1:
                np.copyto(view, array, casting="same_kind")
            elif weight:
                np.multiply(array, weight, out=view, dtype=view.dtype, casting="same_kind")
        with self._explaining():
            return packing.unpack([self._collective.all_reduce(self._for_replicas(flat)) for flat in flats])

    def gather(self, array: Array) -> list[Array]:
        """Every worker's array, in order."""
        with self._explaining():
            parts = self._collective.all_gather(self._for_replicas(array, is_summed=False))
        placement = self._collective.placement
        return [parts[placement.replicas_of(worker)[0]] for worker in self.workers]

    def broadcast(self, array: Array) -> Array:
        """That of the worker that runs replica 0."""
        with self._explaining():
            return self._collective.broadcast(array)

    def _for_replicas(self, array: Array, *, is_summed: bool = True) -> list[Array]:
        """The collective wants a value for each replica: the worker's stands with its first one."""
        nothing = np.zeros_like(array) if is_summed else array[:0]
        return [array] + [nothing] * (len(self._collective.replicas) - 1)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except WorkerLost as error:
            raise WorkerLost(
                error.what,
                why=self._why_lost,
                do=self._do_when_lost,
            ) from None
