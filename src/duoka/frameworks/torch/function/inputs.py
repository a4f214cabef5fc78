"""The inputs of one call: handles of batches and global tensors, cut into each replica's samples."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.torch.function import arguments
from duoka.frameworks.torch.function.batches import Batch
from duoka.frameworks.torch.nested import map_tensors


class Inputs:
    """The arguments of one call: what every replica gets of them."""

    def __init__(self, args: Sequence[Any], num_replicas: int, device: torch.device) -> None:
        self._args, self._num_replicas, self._device = args, num_replicas, device
        self.handles: list[Batch] = []
        self.tensors: list[Any] = []
        self.last_size = 0  # samples of a loader's last batch, if it is smaller and this is the loader's first one
        lengths = []
        for arg in args:
            if isinstance(arg, Batch):
                arg.check_current()
                self.handles.append(arg)
                self.last_size = max(self.last_size, arg.last_size)
                lengths.append(arg.num_samples)
            else:
                self.tensors.append(arg)
        if self.tensors:
            lengths += self._count_tensors(lengths)
        if not lengths:
            raise MismatchError(
                "strategy.backward was given nothing that could be cut by samples.",
                why="every replica computes its own samples of the global batch.",
                do="pass a batch of strategy.batches(loader), or the tensors of the global batch, to the function.",
            )
        self.num_samples, self.fewest_samples = lengths[0], min(lengths)
        self.has_one_length = lengths.count(lengths[0]) == len(lengths)
        if not self.has_one_length or not lengths[0]:
            self._check_lengths(lengths)

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        if min(lengths) == 0:
            raise MismatchError(
                "strategy.backward was given a batch without samples.",
                do="leave the batch out on every worker, or give at least one sample.",
            )
        if not self.has_one_length and min(lengths) < self._num_replicas:
            raise MismatchError(
                f"strategy.backward was given batches of {' and '.join(map(str, lengths))} samples for"
                f" {self._num_replicas} replicas.",
                why="a replica would have samples of one of them and none of another.",
                do="use drop_last=True in the loaders, or larger batches.",
            )

    def _count_tensors(self, lengths: Sequence[int]) -> list[int]:
        count = arguments.count_samples(self.tensors)
        if count is not None and lengths and count != lengths[0]:
            raise MismatchError(
                f"strategy.backward was given {count} samples in tensors and {lengths[0]} in a batch.",
                do="pass tensors with one row per sample of the batch, or close over them in the function.",
            )
        return [] if count is None else [count]

    def describe(self) -> str:
        parts = [handle.title for handle in self.handles]
        return ", ".join([*parts, arguments.describe(self.tensors)] if self.tensors else parts)

    def digest(self, *, is_whole: bool) -> int:
        """Of the values of global tensors; 0 without any."""
        return arguments.fingerprint(self.tensors, is_whole=is_whole) if self.tensors else 0

    def digest_samples(self) -> int:
        """Of samples that all workers must find alike; 0 where none were looked at."""
        digest = 0
        for handle in self.handles:
            if handle.samples_digest:
                digest = zlib.crc32(handle.samples_digest.to_bytes(4, "little"), digest)
        return digest

    def digest_order(self) -> int:
        """Of the indices of the samples in all batches."""
        digest = 0
        for handle in self.handles:
            digest = zlib.crc32(handle.order_digest.to_bytes(4, "little"), digest)
        return digest

    def cut(self, replica: int) -> list[Any]:
        """This replica's arguments, on its device."""
        found: list[Any] = []
        for arg in self._args:
            if isinstance(arg, Batch):
                value = arg.load(replica)
                found += value if type(value) in (tuple, list) else [value]
            else:
                rows = share(self.num_samples, self._num_replicas, replica)
                found.append(map_tensors(arguments.cut(arg, rows.start, rows.stop), self._move))
        return found

    def find_other_length(self, data: Sequence[Any], num_rows: int) -> int | None:
        """Return the length of a replica's tensors if they all have one, and it is not the number of its samples."""
        if not self.handles:
            return None
        lengths: set[int] = set()
        for value in data:
            if isinstance(value, torch.Tensor):
                lengths.update(value.shape[:1])
            elif isinstance(value, Mapping):  # a list may have one tensor per sample, whose rows are something else
                lengths.update(part.shape[0] for part in value.values() if isinstance(part, torch.Tensor) and part.ndim)
        return lengths.pop() if len(lengths) == 1 and num_rows not in lengths else None

    def cutter(self, cuts: Sequence[tuple[int, int]]) -> Callable[[int, int], list[Any]]:
        """A function that returns the arguments for one of these ranges of samples."""
        parts = {id(handle): handle.load_cuts(tuple(cuts)) for handle in self.handles}

        def cut(start: int, stop: int) -> list[Any]:
            found: list[Any] = []
            for arg in self._args:
                if isinstance(arg, Batch):
                    value = parts[id(arg)][list(cuts).index((start, stop))]
                    found += value if type(value) in (tuple, list) else [value]
                else:
                    found.append(map_tensors(arguments.cut(arg, start, stop), self._move))
            return found

        return cut

    @property
    def _move(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return operator.methodcaller("to", self._device, non_blocking=True)
