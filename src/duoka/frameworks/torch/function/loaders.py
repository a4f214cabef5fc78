"""What Duoka keeps for each of the script's loaders, and where each of them is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset

from duoka.collectives.collective import Collective
from duoka.frameworks.torch.function.batches import Batches
from duoka.frameworks.torch.function.seed import BaseSeed
from duoka.frameworks.torch.function.shares import ShareLoader
from duoka.strategies.training_loop import TrainingLoop

_KEPT = "_duoka_kept"  # an attribute of the loader: a loader that is made in each epoch takes its processes with it
UNPREPARED = -1


class Loaders:
    """All loaders of one strategy. Prepared ones have a number: a resumed script prepares them in the same order."""

    def __init__(
        self,
        collective: Collective,
        seed: BaseSeed,
        device: torch.device,
        begin: Callable[[], None],
        tell: Callable[..., None],
        loop: TrainingLoop,
    ) -> None:
        self._collective, self._seed, self._device = collective, seed, device
        self._begin, self._tell, self._loop = begin, tell, loop
        self._num_passes = 0  # begun by this run, over any loader: what is drawn in a pass is seeded by its number
        self._num_prepared = 0
        self._num_before_epoch = 0  # prepared before the epoch under way
        self._known: WeakValueDictionary[int, Batches] = WeakValueDictionary()
        self._saved: dict[int, Any] = {}  # positions of loaders that are not prepared yet in this process

    def prepare(self, loader: DataLoader[Any], *, is_sharded: bool = False) -> None:
        """Give a loader its number."""
        number, self._num_prepared = self._num_prepared, self._num_prepared + 1
        batches = self._kept(loader)["batches"] = self._make(loader, number, is_sharded=is_sharded)
        self._known[number] = batches
        if number in self._saved:
            batches.resume(self._saved.pop(number))

    def batches(self, loader: DataLoader[Any]) -> Batches:
        """The same object for the same loader."""
        kept = self._kept(loader)
        if "batches" not in kept:
            kept["batches"] = self._make(loader, UNPREPARED)
        found: Batches = kept["batches"]
        return found

    def _make(self, loader: DataLoader[Any], number: int, *, is_sharded: bool = False) -> Batches:
        num_replicas, device = self._collective.num_replicas, self._device
        begin, tell, loop = self._begin, self._tell, self._loop
        return Batches(loader, number, self, num_replicas, device, begin, tell, loop, is_sharded=is_sharded)

    def begin_pass(self) -> int:
        """Number a pass over any loader."""
        self._num_passes += 1
        return self._num_passes - 1

    def shares(self, loader: DataLoader[Any]) -> ShareLoader | None:
        """One for training and evaluation alike; None where every worker reads whole batches.

        Made when it is first needed: only then is the script's seed known.
        """
        is_stream = isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None
        if is_stream or self._collective.num_replicas == 1:
            return None
        kept = self._kept(loader)
        if "shares" not in kept:
            kept["shares"] = ShareLoader(loader, self._collective, self._seed.number)
        found: ShareLoader = kept["shares"]
        return found

    def _kept(self, loader: DataLoader[Any]) -> dict[str, Any]:
        by_owner: WeakKeyDictionary[Loaders, dict[str, Any]] = vars(loader).setdefault(_KEPT, WeakKeyDictionary())
        return by_owner.setdefault(self, {})

    # The positions of a run.

    def begin_epoch(self) -> None:
        self._num_before_epoch = self._num_prepared

    def capture(self) -> dict[str, Any]:
        here = {number: batches.capture() for number, batches in sorted(self._known.items())}
        return {
            "num_passes": self._num_passes,
            "num_before_epoch": self._num_before_epoch,
            "positions": self._saved | here,
        }

    def restore(self, state: dict[str, Any], *, is_again: bool) -> None:
        """`is_again`: the script has prepared the loaders of the epoch since the state was restored first."""
        self._num_passes = state["num_passes"]
        if not is_again:
            self._num_prepared = self._num_before_epoch = state["num_before_epoch"]
        positions = dict(state["positions"])
        for number, batches in self._known.items():
            if number in positions:
                batches.resume(positions.pop(number))
        self._saved = positions
