"""Numbers that loop bodies hand in (`strategy.mean`, `.sum`, `.gather`): known once the batch is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duoka.collectives.arrays import as_array
from duoka.collectives.collective import Collective
from duoka.collectives.survivors import gather
from duoka.collectives.values import decode, encode
from duoka.errors import MismatchError

_TOO_LONG = b"!"


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


@dataclass(frozen=True)
class Kind:
    """How the replicas' values become one, and what a replica gives that has nothing to give."""

    combine: Callable[[list[Any]], Any]
    nothing: Any = None


class Contributions:
    """What the bodies of one batch hand in.

    What is handed in before a backward travels with its gradients and is committed with them: a worker that is lost is
    made up for. What comes later, or is long, is exchanged when the batch ends. The update is done by then, and a body
    cannot run again: what a lost worker would have handed in is left out, unless it is its loss, which all know.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.forget()

    def forget(self) -> None:
        """The body that handed these in runs again, or another batch begins."""
        self._given: dict[int, list[Any]] = {}
        self._pending: list[list[Pending]] = []
        self._kinds: list[Kind] = []
        self._known: list[list[Any]] = []  # of the first positions: every replica's value
        self._losses: list[Any] = []  # every replica's, weighed, as a mean would be handed in

    def forget_replicas(self, replicas: Sequence[int]) -> None:
        """Their body begins: what was computed for comparison only may be inherited, and is computed again."""
        for replica in replicas:
            self._given.pop(replica, None)

    def add(self, replica: int, value: Any, kind: Kind) -> Pending:
        mine = self._given.setdefault(replica, [])
        position = len(mine)
        mine.append(value)
        if position == len(self._pending):
            self._pending.append([])
            self._kinds.append(kind)
        pending = Pending()
        self._pending[position].append(pending)
        return pending

    # With the gradients.

    def pack(self, replica: int, room: int) -> bytes:
        """What a replica has handed in since the last backward, in so many bytes."""
        values = self._given.get(replica, [])[len(self._known) :]
        packed = encode(values) if values else b""
        return packed if len(packed) <= room else _TOO_LONG

    def take(self, packed: Sequence[bytes], losses: Sequence[Any]) -> None:
        """What all replicas have packed: everybody sees the same, and draws the same conclusion."""
        self._losses = list(losses)
        if _TOO_LONG in packed:
            return
        by_replica = [decode(data) if data else [] for data in packed]
        if len({len(values) for values in by_replica}) == 1:  # else they are compared when the batch ends
            self._known += [list(values) for values in zip(*by_replica, strict=True)]

    # When the batch ends.

    def settle(self, collective: Collective, step: int) -> None:
        """Make all values known."""
        if not self._given:
            return
        if max(map(len, self._given.values())) > len(self._known):
            self._exchange_rest(collective, step)
        for pending, kind, values in zip(self._pending, self._kinds, self._known, strict=True):
            total = kind.combine(values)
            for one in pending:
                one.settle(total)
        self.forget()

    def _exchange_rest(self, collective: Collective, step: int) -> None:
        start = len(self._known)
        mine = {replica: encode(values[start:]) for replica, values in self._given.items()}
        found = [None if data is None else decode(data) for data in gather(collective, mine, f"of step {step}")]
        numbers = {start + len(values) for values in found if values is not None}
        if len(numbers) != 1:
            raise MismatchError(
                f"The replicas handed in different numbers of values: {sorted(numbers)}.",
                do="call strategy.mean, .sum and .gather in every loop body alike.",
            )
        lost = [replica for replica, values in enumerate(found) if values is None]
        for position in range(start, numbers.pop()):
            given = {replica: values[position - start] for replica, values in enumerate(found) if values is not None}
            self._known.append(self._complete(position, given, lost, step))

    def _complete(self, position: int, given: dict[int, Any], lost: Sequence[int], step: int) -> list[Any]:
        if not lost:
            return [given[replica] for replica in sorted(given)]
        if self._losses and _are_losses(given, self._losses):
            return [given.get(replica, loss) for replica, loss in enumerate(self._losses)]
        self._tell(
            f"value {position + 1} that the bodies of step {step} handed in goes without replica"
            f" {', '.join(map(str, lost))}, lost with a worker after the update; handed in before backward, it would"
            " have travelled with the gradients"
        )
        return [given.get(replica, self._kinds[position].nothing) for replica in range(len(given) + len(lost))]


def _are_losses(given: dict[int, Any], losses: Sequence[Any]) -> bool:
    """Whether every replica that is heard has handed in the mean of its loss: then the lost ones were about to."""
    pairs = [(value, losses[replica]) for replica, value in given.items()]
    is_told = any(loss[1] and loss[0] != 0 for _, loss in pairs)
    return is_told and all(isinstance(value, list) and _is_equal(value, loss) for value, loss in pairs)


def _is_equal(value: list[Any], loss: list[Any]) -> bool:
    if value[1] != loss[1] or np.size(value[0]) != 1:
        return False
    return value[0] is loss[0] is None or bool(np.all(value[0] == loss[0]))


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
