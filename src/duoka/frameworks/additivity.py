"""The additivity probe: is a loss over samples A and B together what its values on A and on B say it is?

A mean over samples is. A sum, a mean over tokens and a contrastive loss are not: replicas that average them train to
other numbers than one device. The probe knows nothing of a framework.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_SAMPLES, FEWEST_SAMPLES = 8, 4
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 3e-2, "bfloat16": 3e-2}
ROUNDING = {"float64": 1e-13, "float32": 4e-6, "float16": 2e-2, "bfloat16": 2e-2}  # of the largest term of a loss
NUM_ROUNDS, NUM_SEEDS, MOST_SPREADS = 3, 6, 5  # for losses that draw random numbers: one round may err by chance


Terms = tuple[float, float, tuple[tuple[float, float], ...]]  # means over samples, sums, and (value, count) of others


@dataclass(frozen=True)
class Finding:
    together: float
    combined: float

    @property
    def difference(self) -> float:
        """Relative to the larger of both. Infinite if only the parts have none: a mean over nothing."""
        if math.isfinite(self.together) and not math.isfinite(self.combined):
            return math.inf
        largest = max(abs(self.together), abs(self.combined))
        return abs(self.together - self.combined) / largest if largest else 0.0

    def is_beyond_rounding(self, dtype: str, size: float) -> bool:
        """Whether rounding cannot explain the difference, in a loss that is made of numbers of this size.

        A loss near zero may be the difference of large terms, or have fallen from where it began.

        >>> Finding(1e-6, 1.1e-6).is_beyond_rounding("float32", size=2.0)
        False
        """
        if self.difference <= TOLERANCES[dtype]:
            return False
        return not abs(self.together - self.combined) <= ROUNDING[dtype] * size


def is_beyond_chance(findings: Sequence[Finding]) -> bool:
    """Whether losses that draw random numbers differ by more than their draws explain. One finding for each seed.

    >>> is_beyond_chance([Finding(8.1, 4.2), Finding(7.9, 4.3), Finding(8.0, 4.1)])
    True
    >>> is_beyond_chance([Finding(1.1, 1.0), Finding(0.9, 1.2), Finding(1.0, 0.9)])
    False
    """
    together, combined = [each.together for each in findings], [each.combined for each in findings]
    # Both: of a few numbers, one spread may be small by chance.
    spread = max(statistics.stdev(together), statistics.stdev(combined))
    return abs(statistics.fmean(together) - statistics.fmean(combined)) > MOST_SPREADS * spread


def split(num_samples: int) -> tuple[int, int]:
    """Return the sizes of A and B: unequal, because equal halves hide a mean of means.

    >>> split(100), split(4)
    ((5, 3), (3, 1))
    """
    count = min(num_samples, MOST_SAMPLES)
    first = count // 2 + 1
    return first, count - first


def probe(evaluate: Callable[[int, int], Terms], sizes: tuple[int, int]) -> Finding:
    """Compare a loss on A+B with what A and B combine to.

    `evaluate(start, stop)` returns the loss on these samples: its terms that are means over samples, those that are
    sums, and (value, count) of each other term.

    >>> mean = lambda start, stop: (sum(range(start, stop)) / (stop - start), 0.0, ())
    >>> probe(mean, (5, 3)).difference < 1e-12
    True
    >>> total = lambda start, stop: (float(sum(range(start, stop))), 0.0, ())
    >>> probe(total, (5, 3)).difference > 0.4
    True
    """
    first, second = sizes
    count = first + second
    mean_a, sum_a, counted_a = evaluate(0, first)
    mean_b, sum_b, counted_b = evaluate(first, count)
    mean, total, counted = evaluate(0, count)
    combined = (first * mean_a + second * mean_b) / count + sum_a + sum_b
    for (value_a, count_a), (value_b, count_b) in zip(counted_a, counted_b, strict=True):
        together = count_a + count_b
        parts = (value_a * count_a if count_a else 0.0) + (value_b * count_b if count_b else 0.0)
        combined += parts / together if together else 0.0
    return Finding(mean + total + sum(value for value, number in counted if number), combined)
