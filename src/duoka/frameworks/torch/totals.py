"""Metrics as (sum, count) pairs: what an evaluation function returns, added up in float64, batch by batch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from duoka.errors import MismatchError

_ALONE = ""  # the name of a pair that was returned without one
_DO = (
    "return (sum, count), or a dictionary of such pairs: numbers or tensors, the same names and shapes for every batch."
)


@dataclass(frozen=True)
class Metrics:
    """What is measured: the name, the shape of the sum and the shape of the count of each metric."""

    kinds: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(math.prod(sums) + math.prod(counts) for _, sums, counts in self.kinds)

    @property
    def title(self) -> str:
        parts = [f"{name or '(sum, count)'}{list(sums) if sums else ''}" for name, sums, _ in self.kinds]
        return ", ".join(parts) or "an empty dictionary"

    def encode(self) -> bytes:
        return json.dumps(self.kinds).encode()

    @classmethod
    def decode(cls, text: bytes) -> Metrics:
        return cls(tuple((name, tuple(sums), tuple(counts)) for name, sums, counts in json.loads(text)))

    def divide(self, flat: np.ndarray) -> tuple[Any, list[str]]:
        """Each metric's sum / count, and the names of those whose counts are all zero: they are NaN."""
        answers: dict[str, Any] = {}
        empty = []
        start = 0
        for name, sum_shape, count_shape in self.kinds:
            middle = start + math.prod(sum_shape)
            end = middle + math.prod(count_shape)
            sums, counts = flat[start:middle].reshape(sum_shape), flat[middle:end].reshape(count_shape)
            means = np.full(sum_shape, np.nan)
            np.divide(sums, counts, out=means, where=np.broadcast_to(counts != 0, sum_shape))
            answers[name] = torch.from_numpy(means) if sum_shape else float(means)
            if not counts.any():
                empty.append(name)
            start = end
        return (answers[_ALONE] if list(answers) == [_ALONE] else answers), empty


class Totals:
    """The pairs of one replica, so far. They stay on the device where they were computed until they are read."""

    def __init__(self) -> None:
        self.metrics: Metrics | None = None
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def of(cls, metrics: Metrics | None, flat: np.ndarray) -> Totals:
        """What `flatten` gave."""
        totals, start = cls(), 0
        totals.metrics = metrics
        for _, *shapes in () if metrics is None else metrics.kinds:
            pair = []
            for shape in shapes:
                end = start + math.prod(shape)
                pair.append(torch.from_numpy(flat[start:end].reshape(shape)))
                start = end
            totals._pairs.append((pair[0], pair[1]))
        return totals

    def add(self, returned: Any) -> None:
        named = returned if isinstance(returned, dict) else {_ALONE: returned}
        pairs = [_read_pair(name, pair) for name, pair in named.items()]
        metrics = Metrics(tuple((n, tuple(s.shape), tuple(c.shape)) for n, (s, c) in zip(named, pairs, strict=True)))
        if isinstance(returned, dict) and _ALONE in returned:
            raise MismatchError("The function given to strategy.evaluate used an empty string as a name.", do=_DO)
        if self.metrics is None:
            self.metrics, self._pairs = metrics, pairs
        elif metrics != self.metrics:
            raise MismatchError(
                "The function given to strategy.evaluate returned"
                f" {self.metrics.title} for one batch and {metrics.title} for another.",
                do=f"{_DO} Where there is nothing to count, return (0, 0).",
            )
        else:
            both = zip(self._pairs, pairs, strict=True)
            self._pairs = [(sums + more, counts + others) for (sums, counts), (more, others) in both]

    def describe(self) -> np.ndarray:
        """What is measured, as bytes."""
        assert self.metrics is not None, "this replica has had no row"
        return np.frombuffer(self.metrics.encode(), np.uint8)

    def flatten(self) -> np.ndarray:
        """All sums and counts, in the order of the metrics."""
        assert self.metrics is not None, "this replica has had no row"
        for (name, _, _), (_, counts) in zip(self.metrics.kinds, self._pairs, strict=True):
            if not bool(torch.isfinite(counts).all() and (counts >= 0).all()):
                raise MismatchError(
                    f"The function given to strategy.evaluate returned counts of {counts.tolist()} in all"
                    f"{f' for {name!r}' if name else ''}.",
                    do="return the sum first and then the count, which is the number of things summed over.",
                )
        parts = [part.cpu().numpy().reshape(-1) for pair in self._pairs for part in pair]
        return np.concatenate([np.empty(0), *parts])


def _read_pair(name: Any, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
    where = f" for {name!r}" if name != _ALONE else ""
    if not isinstance(name, str):
        raise MismatchError(f"The function given to strategy.evaluate used {name!r} as a name.", do=_DO)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        given = f"{len(pair)} values" if isinstance(pair, (tuple, list)) else f"a {type(pair).__name__}"
        raise MismatchError(
            f"The function given to strategy.evaluate returned {given}{where}, not a sum and a count.",
            why="means of replicas with different numbers of rows cannot be put together again.",
            do=_DO,
        )
    sums, counts = (_read_number(part, where) for part in pair)
    if counts.shape not in (torch.Size(), sums.shape):
        raise MismatchError(
            f"The function given to strategy.evaluate returned a sum of shape {tuple(sums.shape)}"
            f" and a count of shape {tuple(counts.shape)}{where}.",
            do="return one count, or one for each number of the sum.",
        )
    return sums, counts


def _read_number(value: Any, where: str) -> torch.Tensor:
    is_number = isinstance(value, (torch.Tensor, np.ndarray, np.generic, bool, int, float))
    try:
        tensor = torch.as_tensor(value).detach() if is_number else None
    except (TypeError, RuntimeError):  # arrays of strings or objects, integers beyond 64 bits
        tensor = None
    if tensor is None or tensor.is_complex() or tensor.layout is not torch.strided:
        kind = f"{type(value).__name__}{'' if tensor is None else f' of {tensor.dtype}, {tensor.layout}'}"
        raise MismatchError(f"The function given to strategy.evaluate returned a {kind}{where}, not a number.", do=_DO)
    return tensor.to(torch.float64)
