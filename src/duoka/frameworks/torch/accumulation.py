"""Gradients of several batches as one: the mean over all their rows, as if they had been one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


class Accumulation:
    """Sums over the batches so far. An update is due with every k-th batch, and with the last one of a loader.

    Sums belong to parameters, not to places: layers may be frozen or added in between.
    """

    def __init__(self, num_batches: int = 1) -> None:
        self.num_batches = num_batches
        self.batches_before = 0
        self._count = 0.0
        self._count_of_batch = 0.0
        self._sums: dict[int, torch.Tensor] = {}

    def is_due(self, is_last: bool) -> bool:
        return is_last or self.batches_before + 1 >= self.num_batches

    def add(
        self,
        parameters: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor],
        used: np.ndarray,
        count: float | None,
        is_first_round: bool,
    ) -> None:
        """A batch with which no update is due: keep its sums. Without a count they are sums, not means."""
        if is_first_round:
            self._count_of_batch = count or 0.0
        for parameter, view, is_used in zip(parameters, views, used, strict=True):
            if is_used:
                total = self._sums.setdefault(id(parameter), torch.zeros_like(view))
                total.add_(view, alpha=1.0 if count is None else count)

    def finish(
        self,
        parameters: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor],
        used: np.ndarray,
        count: float | None,
        is_first_round: bool,
    ) -> np.ndarray:
        """The batch with which an update is due: these sums become the mean over all rows. Returns what was used."""
        if not self.batches_before:
            return used
        if is_first_round:
            self._count_of_batch = count or 0.0
        whole = self._count + self._count_of_batch
        scale = (1.0, 1.0) if count is None else (count / whole, 1 / whole)
        used = used.copy()
        for index, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
            view.mul_(scale[0]) if used[index] else view.zero_()
            if is_first_round and id(parameter) in self._sums:
                view.add_(self._sums[id(parameter)], alpha=scale[1])
                used[index] = True
        return used

    def end_batch(self, was_due: bool) -> None:
        if was_due:
            self.batches_before, self._count = 0, 0.0
            self._sums.clear()
        else:
            self.batches_before += 1
            self._count += self._count_of_batch

    def capture(self, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What has been added up so far, at a border between batches."""
        sums = {name: self._sums[id(p)] for name, p in named.items() if id(p) in self._sums}
        before = self.batches_before
        return {"num_batches": self.num_batches, "batches_before": before, "count": self._count, "sums": sums}

    def restore(self, state: dict[str, Any], named: Mapping[str, torch.Tensor]) -> None:
        self.num_batches = state["num_batches"] if self.num_batches == 1 else self.num_batches
        self.batches_before, self._count = state["batches_before"], state["count"]
        self._sums = {id(named[name]): total.to(named[name].device, copy=True) for name, total in state["sums"].items()}
