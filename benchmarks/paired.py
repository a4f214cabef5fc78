"""Paired ratios: contestants take turns in rounds, and only times of the same round are compared.

    python -m pytest tests/unit/test_benchmarks.py

A shared machine is slower in one minute than in the next. A ratio of two times of the same round does not show
that; a ratio of two medians of a whole run does. In each round every contestant runs one burst of steps. The order
rotates from round to round and changes its direction, so that no contestant always follows the same one. The peer
runs twice in each round. The ratio of its two times (A/A) has the true value 1, so it shows the error of the method.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS, FLOOR = "duoka", "floor"
MIN_ROUNDS = 15
QUIET = (0.97, 1.03)  # an A/A outside of it: the row says "noise"
QUICK_HEADER = "| row | peer/duoka | 10-90 % | A/A (10-90 %) | duoka/floor | unit times |\n|---|---|---|---|---|---|"


def again(peer: str) -> str:
    """The name of a peer's second burst in a round."""
    return f"{peer} again"


def arrange(peers: Sequence[str], others: Sequence[str] = (FLOOR,)) -> list[str]:
    """The names of one round: each peer once before Duoka and once after it.

    >>> arrange(["ddp"])
    ['ddp', 'duoka', 'ddp again', 'floor']
    """
    return [*peers, OURS, *map(again, peers), *others]


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of one round. After as many rounds as there are names, the direction changes.

    >>> [order("abc", n) for n in (0, 1, 3)]
    [['a', 'b', 'c'], ['b', 'c', 'a'], ['c', 'b', 'a']]
    """
    shift = number % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if number // len(names) % 2 else turned


def run_rounds(
    names: Sequence[str], run_burst: Callable[[str], Sequence[float] | None], num_rounds: int, num_warm_up: int = 1
) -> dict[str, list[list[float]]]:
    """Run all rounds and return the times of the steps, by contestant and round.

    `run_burst` takes the name without " again". It returns the times of the steps of a burst, or None if the contestant
    failed: that contestant is then left out of all rounds.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(-num_warm_up, num_rounds):
        for name in order(list(times), max(number, 0)):
            if name not in times:
                continue
            steps = run_burst(name.removesuffix(" again"))
            if steps is None:
                times.pop(name.removesuffix(" again"), None)
                times.pop(again(name.removesuffix(" again")), None)
            elif number >= 0:
                times[name].append(list(steps))
    return times


def typical(steps: Sequence[float]) -> float:
    """The median step of a burst. The first step finds cold caches and is left out, unless it is the only one."""
    return statistics.median(steps[1:] or steps)


@dataclass(frozen=True)
class Spread:
    """A median, with the range that holds the middle 80 % of the values."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), _quantile(values, 0.1), _quantile(values, 0.9), len(values))

    @property
    def is_quiet(self) -> bool:
        return QUIET[0] <= self.median <= QUIET[1]

    def range(self, digits: int = 2) -> str:
        """Empty for a single value: numbers of before the rounds have no range."""
        return f"{self.low:.{digits}f} to {self.high:.{digits}f}" if self.count > 1 else ""

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.range()})" if self.count > 1 else f"{self.median:.2f}"


@dataclass(frozen=True)
class Contest:
    """One time per round for each contestant, all in the same unit."""

    times: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, rounds: Mapping[str, Sequence[Sequence[float]]], scale: float = 1e3) -> Contest:
        """Of the steps that `run_rounds` returns. The default scale turns seconds into milliseconds."""
        return cls({name: [scale * typical(steps) for steps in found] for name, found in rounds.items()})

    @classmethod
    def read(cls, numbers: Mapping[str, Any]) -> Contest:
        """Of numbers.json. Entries from before the rounds have one median for each contestant."""
        return cls({who: found if isinstance(found, list) else [found] for who, found in numbers.items()})

    def write(self) -> dict[str, list[float]]:
        return {name: [float(f"{value:.5g}") for value in values] for name, values in self.times.items()}

    def typical(self, name: str) -> float:
        return statistics.median(self._all(name))

    def against(self, peer: str) -> Spread:
        """The peer's time in Duoka's: above 1, Duoka is faster. Each burst of the peer is a ratio of its own.

        Noise makes bursts slower, never faster: a mean of two would be hit more often than the one it is compared with.
        >>> times = {"ddp": [10.0, 10.0, 13.0], "ddp again": [13.0, 10.0, 10.0], OURS: [10.0, 10.0, 10.0]}
        >>> Contest(times).against("ddp").median
        1.0
        """
        return Spread.of(self._ratios(peer, OURS))

    def in_times_of(self, name: str, what: str = OURS) -> Spread:
        """The time of `what` (Duoka's) in that of a contestant: `duoka/floor`, `duoka/plain`."""
        return Spread.of([1 / ratio for ratio in self._ratios(name, what)])

    def above_floor(self) -> float:
        """The median of Duoka's time less that of the floor in the same round: the cost of the exchange."""
        return statistics.median(a - b for a, b in zip(self.times[OURS], self.times[FLOOR], strict=True))

    def control(self, peer: str) -> Spread | None:
        """A/A: the peer's first burst of a round in its second. None if it ran once a round."""
        return _spread(self.times[peer], self.times[again(peer)]) if again(peer) in self.times else None

    def better(self, peers: Sequence[str]) -> str | None:
        """The fastest of these peers that took part; a peer is also found by its name without the threads."""
        kinds = {name: name.rstrip("0123456789").rstrip() for name in self.times if not name.endswith(" again")}
        found = [name for name, kind in kinds.items() if name in peers or kind in peers]
        return min(found, key=self.typical) if found else None

    def _ratios(self, name: str, what: str) -> list[float]:
        bursts = [self.times[each] for each in (name, again(name)) if each in self.times]
        return [a / b for burst in bursts for a, b in zip(burst, self.times[what], strict=True)]

    def _all(self, name: str) -> list[float]:
        return [*self.times[name], *self.times.get(again(name), [])]


def quick_row(title: str, contest: Contest, peer: str, unit: str = "ms") -> str:
    """One line of the table of `run.py --quick`, without the header."""
    ratio, control = contest.against(peer), contest.control(peer)
    same = "" if control is None else f"{control}" + ("" if control.is_quiet else " noise")
    floor = f"{contest.in_times_of(FLOOR)}" if FLOOR in contest.times else ""
    names = [peer, OURS, FLOOR] if FLOOR in contest.times else [peer, OURS]
    times = ", ".join(f"{name} {contest.typical(name):.3g}" for name in names)
    times += f", duoka - floor {contest.above_floor():.2g}" if FLOOR in contest.times else ""
    return f"| {title}, against {peer} | {ratio.median:.2f} | {ratio.range()} | {same} | {floor} | {times} {unit} |"


def _spread(above: Sequence[float], below: Sequence[float]) -> Spread:
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def _quantile(values: Sequence[float], share: float) -> float:
    """Between the two values around it, in proportion."""
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    before = int(place)
    after = min(before + 1, len(ranked) - 1)
    return ranked[before] + (place - before) * (ranked[after] - ranked[before])
