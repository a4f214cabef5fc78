"""Numbers that loop bodies hand in (`strategy.mean`, `.sum`, `.gather`): known once the batch is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from duoka.collectives.arrays import as_array
from duoka.collectives.collective import Collective
from duoka.collectives.values import decode, encode
from duoka.errors import MismatchError


class Pending:
    """A value over all replicas, to be read after the batch: by float(), by NumPy, or as `.value`.

    The same call in every replica's body gives the same object's worth of answer.
    """

    def __init__(self) -> None:
        self._value: Any = None
        self._is_known = False

    def settle(self, value: Any) -> None:
        self._value, self._is_known = value, True

    @property
    def value(self) -> Any:
        if not self._is_known:
            raise MismatchError(
                "This value is not known yet: other replicas of the batch have not been heard.",
                do="keep it in a list, and read it (float(value)) in the next loop body or after the loop.",
            )
        return self._value

    def __float__(self) -> float:
        return float(self.value)

    def item(self) -> float:
        return float(self)

    def __add__(self, other: Any) -> Any:
        return self.value + other

    def __radd__(self, other: Any) -> Any:
        return other + self.value

    def __mul__(self, other: Any) -> Any:
        return self.value * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self.value / other

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def __format__(self, spec: str) -> str:
        return format(float(self.value), spec)

    def __repr__(self) -> str:
        return repr(self._value) if self._is_known else "<not known before the batch is complete>"


class Contributions:
    """What the bodies of one batch handed in, exchanged in one call when the batch ends."""

    def __init__(self) -> None:
        self._given: dict[int, list[Any]] = {}
        self._pending: list[list[Pending]] = []
        self._combine: list[Callable[[list[Any]], Any]] = []

    def add(self, replica: int, value: Any, combine: Callable[[list[Any]], Any]) -> Pending:
        mine = self._given.setdefault(replica, [])
        position = len(mine)
        mine.append(value)
        if position == len(self._pending):
            self._pending.append([])
            self._combine.append(combine)
        pending = Pending()
        self._pending[position].append(pending)
        return pending

    def forget(self) -> None:
        """The body that handed these in runs again."""
        self._given, self._pending, self._combine = {}, [], []

    def settle(self, collective: Collective) -> None:
        """Exchange what was handed in, in the order of replicas, and make all values known."""
        if not self._given:
            return
        blobs = [np.frombuffer(encode(self._given.get(r, [])), np.uint8) for r in collective.replicas]
        by_replica = [decode(bytes(blob)) for blob in collective.all_gather(blobs)]
        if len({len(values) for values in by_replica}) > 1:
            raise MismatchError(
                f"The replicas handed in different numbers of values: {[len(values) for values in by_replica]}.",
                do="call strategy.mean, .sum and .gather in every loop body alike.",
            )
        for position, (pending, combine) in enumerate(zip(self._pending, self._combine, strict=True)):
            total = combine([values[position] for values in by_replica])
            for one in pending:
                one.settle(total)
        self.forget()


def tree_sum(values: list[Any]) -> Any:
    """The sum in tree order; values of None are left out."""
    if len(values) == 1:
        return values[0]
    middle = len(values) // 2
    left, right = tree_sum(values[:middle]), tree_sum(values[middle:])
    return right if left is None else left if right is None else left + right


def weighed(value: Any, count: float) -> list[Any]:
    """(value * count, count): means are kept as sums and counts. A count of zero leaves the value out."""
    return [None, 0.0] if count == 0 else [as_array(value).astype(np.float64) * count, float(count)]


def mean_of(pairs: list[Any]) -> Any:
    count = tree_sum([pair[1] for pair in pairs])
    return tree_sum([pair[0] for pair in pairs]) / count if count else float("nan")
