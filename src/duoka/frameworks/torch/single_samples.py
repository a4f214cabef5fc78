"""BatchNorm on one value per channel: an error that names the layer, the replica and its number of samples.

A variance needs two values. A replica with one sample has one value per channel in layers that normalise vectors, or
maps of 1 x 1. PyTorch raises from within the layer and knows nothing of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from duoka.data.shares import share
from duoka.errors import MismatchError


class SingleSamples:
    """Watches the BatchNorm layers of some models, in batches that leave a replica one sample."""

    def __init__(self, models: Sequence[nn.Module], num_replicas: int, tell: Callable[..., None]) -> None:
        self._models, self._num_replicas, self._tell = models, num_replicas, tell

    def watch(self, replica: int, num_samples: int, total: int, last_total: int = 0) -> Callable[[], None]:
        """Refuse one value per channel while a replica computes; warn if a last batch of `last_total` will have it.

        Returns:
            The function that ends the watch. Ordinary batches are not watched, and cost nothing.
        """
        later = self._find_single(last_total)
        if num_samples != 1 and later is None:
            return _nothing
        hooks = []
        for model in self._models:
            for name, layer in model.named_modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    title = f"{type(layer).__name__} {name}".rstrip()
                    look = self._make_look(title, replica, total, last_total, later)
                    hooks.append(layer.register_forward_pre_hook(look))

        def remove() -> None:
            for hook in hooks:
                hook.remove()

        return remove

    def _find_single(self, total: int) -> int | None:
        """Return the first replica that has one sample in a batch of so many."""
        if not total:
            return None
        sizes = [len(share(total, self._num_replicas, replica)) for replica in range(self._num_replicas)]
        return sizes.index(1) if 1 in sizes else None

    def _make_look(
        self, title: str, replica: int, total: int, last_total: int, later: int | None
    ) -> Callable[[nn.Module, Any], None]:
        def look(layer: nn.Module, args: Any) -> None:
            if not layer.training or not args or args[0].ndim < 2:
                return
            num_values = args[0].numel() // max(args[0].shape[1], 1)
            if num_values == 1:
                raise self._refuse(title, replica, f"this batch of {total}")
            if later is not None and num_values == len(args[0]):
                # Not an error: a model may leave the layer out for a single sample.
                self._tell(
                    f"{title} will not be able to normalise one value per channel: replica {later} has 1 sample of the"
                    f" last batch of {last_total}; use drop_last=True in the DataLoader, or another batch_size",
                    "last batch",
                )

        return look

    def _refuse(self, title: str, replica: int, batch: str) -> MismatchError:
        return MismatchError(
            f"{title} cannot normalise one value per channel: replica {replica} has 1 sample of {batch}.",
            why=f"{self._num_replicas} replicas share each batch, and the variance of one value is not defined.",
            do="use a larger batch_size, drop_last=True in the DataLoader, fewer replicas, or"
            " sync_batchnorm=True with one replica per worker.",
        )


def count_last_batch(loader: DataLoader[Any]) -> int:
    """Return the number of samples in the last batch of a loader if it is a smaller one, otherwise 0."""
    sampler = loader.batch_sampler
    if type(sampler) is not BatchSampler or sampler.drop_last:
        return 0
    try:
        return len(sampler.sampler) % sampler.batch_size
    except TypeError:
        return 0  # a sampler without a length


def _nothing() -> None:
    pass
