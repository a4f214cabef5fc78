"""What Duoka keeps for each of the script's loaders, as long as the loader itself lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset

from duoka.collectives.collective import Collective
from duoka.frameworks.torch.function.batches import Batches
from duoka.frameworks.torch.function.seed import BaseSeed
from duoka.frameworks.torch.function.shares import ShareLoader

_KEPT = "_duoka_kept"  # an attribute of the loader: a loader that is made in each epoch takes its processes with it


class Loaders:
    def __init__(
        self,
        collective: Collective,
        seed: BaseSeed,
        device: torch.device,
        begin: Callable[[], None],
        tell: Callable[..., None],
    ) -> None:
        self._collective, self._seed, self._device = collective, seed, device
        self._begin, self._tell = begin, tell
        self._count = 0

    def batches(self, loader: DataLoader[Any]) -> Batches:
        """The same object for the same loader."""
        kept = self._kept(loader)
        if "batches" not in kept:
            kept["batches"] = Batches(
                loader, self.shares, self._collective.num_replicas, self._device, self._begin, self._tell
            )
        found: Batches = kept["batches"]
        return found

    def shares(self, loader: DataLoader[Any]) -> ShareLoader | None:
        """One for training and evaluation alike; None where every worker reads whole batches.

        Made when it is first needed: only then is the script's seed known.
        """
        is_stream = isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None
        if is_stream or self._collective.num_replicas == 1:
            return None
        kept = self._kept(loader)
        if "shares" not in kept:
            self._count += 1
            kept["shares"] = ShareLoader(loader, self._collective, self._seed.number, self._count)
        found: ShareLoader = kept["shares"]
        return found

    def _kept(self, loader: DataLoader[Any]) -> dict[str, Any]:
        by_owner: WeakKeyDictionary[Loaders, dict[str, Any]] = vars(loader).setdefault(_KEPT, WeakKeyDictionary())
        return by_owner.setdefault(self, {})
