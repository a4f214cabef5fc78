"""Gradients of several batches as one: the mean over all their rows, as if they had been one batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class Accumulation:
    """Sums over the batches so far. An update is due with every k-th batch, and with the last one of a loader."""

    def __init__(self, num_batches: int = 1) -> None:
        self.num_batches = num_batches
        self.batches_before = 0
        self._count = 0.0
        self._count_of_batch = 0.0
        self._sums: list[torch.Tensor] = []
        self._used: np.ndarray | None = None

    def is_due(self, is_last: bool) -> bool:
        return is_last or self.batches_before + 1 >= self.num_batches

    def add(self, views: Sequence[torch.Tensor], used: np.ndarray, count: float, is_first_round: bool) -> None:
        """A batch with which no update is due: keep its sums."""
        if not self._sums:
            self._sums = [torch.zeros_like(view) for view in views]
            self._used = np.zeros(len(views), bool)
        if is_first_round:
            self._count_of_batch = count
        assert self._used is not None
        self._used |= used
        for total, view, is_used in zip(self._sums, views, used, strict=True):
            if is_used:
                total.add_(view, alpha=count)

    def finish(self, views: Sequence[torch.Tensor], used: np.ndarray, count: float, is_first_round: bool) -> np.ndarray:
        """The batch with which an update is due: these sums become the mean over all rows. Returns what was used."""
        if not self.batches_before:
            return used
        if is_first_round:
            self._count_of_batch = count
        whole = self._count + self._count_of_batch
        for index, view in enumerate(views):
            if used[index]:
                view.mul_(count / whole)
            else:
                view.zero_()
            if is_first_round:
                view.add_(self._sums[index], alpha=1 / whole)
        assert self._used is not None
        return used | self._used if is_first_round else used

    def end_batch(self, was_due: bool) -> None:
        if was_due:
            self.batches_before, self._count = 0, 0.0
            for total in self._sums:
                total.zero_()
            if self._used is not None:
                self._used[:] = False
        else:
            self.batches_before += 1
            self._count += self._count_of_batch

    def forget(self) -> None:
        """Other parameters from now on."""
        self._sums, self._used = [], None
