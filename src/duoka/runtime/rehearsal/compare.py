"""Comparison of two records: weights, printed lines and metrics, bit by bit or within a tolerance."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from duoka.runtime.rehearsal.record import Call, Line, Record, Tensor, as_numbers

TOLERANCE = 1e-4
COLUMNS = ("weights", "printed lines", "metrics")
Key = tuple[str, str]  # where a line was printed, and its text without numbers
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]*\d)")
_DIGITS = re.compile(r"\d+(?:\.\d+)?")
_WORKER = re.compile(r"^\[w\d+\] ")
_OF_OPTIMIZER = re.compile(r"^(\S+) of .* (in optimizer \d+)$")


@dataclass(frozen=True)
class Difference:
    """The first difference of two records in one column."""

    what: str  # that differs: a tensor, the line of a print, a metric
    left: str
    right: str


@dataclass(frozen=True)
class Comparison:
    """Two records, column by column: None where they are equal; columns that neither has are left out."""

    found: dict[str, Difference | None]

    @property
    def is_equal(self) -> bool:
        return all(difference is None for difference in self.found.values())


def compare(left: Record, right: Record, noise: Collection[Key] = (), tolerance: float = 0.0) -> Comparison:
    """Compare two records. Lines whose key is in `noise` are left out."""
    found: dict[str, Difference | None] = {}
    if left.tensors or right.tensors:
        found["weights"] = _compare_tensors(left.tensors, right.tensors, tolerance)
    found["printed lines"] = _compare_lines(left, right, noise, tolerance)
    if left.main.calls or right.main.calls:
        found["metrics"] = _compare_calls(left.main.calls, right.main.calls, tolerance)
    return Comparison(found)


# Weights.


def _compare_tensors(left: Sequence[Tensor], right: Sequence[Tensor], tolerance: float) -> Difference | None:
    for one, other in zip(left, right, strict=False):
        if (one.name, one.kind) != (other.name, other.kind):
            return Difference("the list of tensors", f"{one.name}: {one.kind}", f"{other.name}: {other.kind}")
    if len(left) != len(right):
        return Difference("the list of tensors", f"{len(left)} tensors", f"{len(right)} tensors")
    scales = _scales_of([*left, *right]) if tolerance else {}
    for one, other in zip(left, right, strict=True):
        if one.data == other.data:
            continue
        numbers, others = as_numbers(one), as_numbers(other)
        if numbers is None or others is None:
            return Difference(one.name, "other bytes", "other bytes")
        place = _first_difference(numbers, others, tolerance * scales.get(_group_of(one.name), 0.0))
        if place is not None:
            change = _largest(numbers - others) / max(_largest(numbers), _largest(others), 1e-300)
            what = f"{one.name}, element {place} (largest relative difference {change:.1e})"
            return Difference(what, *(repr(float(each[place])) for each in (numbers, others)))
    return None


def _scales_of(tensors: Sequence[Tensor]) -> dict[str, float]:
    """The largest value of each tensor; of an optimizer's state, the largest of all tensors of that kind.

    A bias before a normalisation has a gradient of zero, computed as rounding noise: relative to itself its momentum
    is never equal.
    """
    scales: dict[str, float] = {}
    for tensor in tensors:
        numbers, group = as_numbers(tensor), _group_of(tensor.name)
        if numbers is not None:
            scales[group] = max(scales.get(group, 0.0), _largest(numbers))
    return scales


def _largest(numbers: Any) -> float:
    return float(np.max(np.abs(numbers[np.isfinite(numbers)]), initial=0.0))


def _group_of(name: str) -> str:
    found = _OF_OPTIMIZER.match(name)
    return name if found is None else f"{found[1]} {found[2]}"


def _first_difference(left: Any, right: Any, allowed: float) -> int | None:
    both_nan = np.isnan(left) & np.isnan(right)
    if allowed:
        differs = ~(np.abs(left - right) <= allowed) & ~both_nan
    else:
        # Minus zero is another value than zero, bit by bit.
        differs = ((left != right) | (np.signbit(left) != np.signbit(right))) & ~both_nan
    places = np.flatnonzero(differs)
    return int(places[0]) if places.size else None


# Printed lines.


def key_of(line: Line) -> Key:
    """Name a line by its statement and its words; lines of one statement that differ in numbers have the same key.

    >>> key_of(Line("step 3 took 0.25 s", "train.py:9"))
    ('train.py:9', 'step # took # s')
    """
    return line.where, _DIGITS.sub("#", _WORKER.sub("", line.text))


def find_noise(left: Record, right: Record) -> set[Key]:
    """Find the lines that differ between two runs that should be equal: times, process ids, addresses."""
    pairs = ((left.lines, right.lines), (left.lines_of_others, right.lines_of_others))
    return {key_of(line) for one, other in pairs for line in _unequal(one, other)}


def count_noise(record: Record, noise: Collection[Key]) -> int:
    """Count such lines of the main worker, and those of others that it never prints."""
    printed = {key_of(line) for line in record.lines}
    others = [line for line in record.lines_of_others if key_of(line) not in printed]
    return sum(key_of(line) in noise for line in (*record.lines, *others))


def _unequal(left: Sequence[Line], right: Sequence[Line]) -> Iterator[Line]:
    if len(left) == len(right):
        for one, other in zip(left, right, strict=True):
            if one != other:
                yield from (one, other)
        return
    for kind, start, stop, other_start, other_stop in SequenceMatcher(None, left, right, False).get_opcodes():
        if kind != "equal":
            yield from (*left[start:stop], *right[other_start:other_stop])


def _compare_lines(left: Record, right: Record, noise: Collection[Key], tolerance: float) -> Difference | None:
    for of_left, of_right in ((left.lines, right.lines), (left.lines_of_others, right.lines_of_others)):
        lines = [line for line in of_left if key_of(line) not in noise]
        others = [line for line in of_right if key_of(line) not in noise]
        for place in range(max(len(lines), len(others))):
            one = lines[place] if place < len(lines) else None
            other = others[place] if place < len(others) else None
            if one is None or other is None or not _says_the_same(one.text, other.text, tolerance):
                where = (one or other or Line("")).where
                what = f"line {place + 1}" + (f", printed by {where}" if where else "")
                return Difference(what, *("no such line" if each is None else each.text for each in (one, other)))
    return None


def _says_the_same(left: str, right: str, tolerance: float) -> bool:
    """Compare two lines; with a tolerance, numbers may also differ by one unit of the last printed digit.

    >>> _says_the_same("step 3: 0.1234", "step 3: 0.1235", 1e-4), _says_the_same("step 3: 0.5", "step 4: 0.5", 1e-4)
    (True, False)
    """
    if left == right or not tolerance:
        return left == right
    if _NUMBER.sub("#", left) != _NUMBER.sub("#", right):
        return False
    pairs = zip(_NUMBER.findall(left), _NUMBER.findall(right), strict=True)
    return all(_is_close(one, other, tolerance) for one, other in pairs)


def _is_close(left: str, right: str, tolerance: float) -> bool:
    if left == right:
        return True
    if not any(mark in text for text in (left, right) for mark in ".eE"):
        return False  # whole numbers are counts
    one, other = float(left), float(right)
    allowed = max(tolerance * max(abs(one), abs(other)), 1.001 * max(_last_digit(left), _last_digit(right)))
    return abs(one - other) <= allowed


def _last_digit(text: str) -> float:
    """
    >>> _last_digit("0.12"), _last_digit("1.5e-3")
    (0.01, 0.0001)
    """
    digits, _, exponent = text.lower().partition("e")
    return float(f"1e{int(exponent or 0) - len(digits.partition('.')[2])}")


# Metrics.


def _compare_calls(left: Sequence[Call], right: Sequence[Call], tolerance: float) -> Difference | None:
    scales: dict[str, float] = {}
    for call in (*left, *right) if tolerance else ():
        for name, numbers in call.items():
            scales[name] = max(scales.get(name, 0.0), _largest(np.array(numbers, float)))
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        where = f"call {place + 1} of strategy.backward"
        if [*one] != [*other]:
            return Difference(f"the metrics of {where}", ", ".join(one), ", ".join(other))
        for name in one:
            if len(one[name]) != len(other[name]):
                what = f"{name} of {where}"
                return Difference(what, f"{len(one[name])} numbers", f"{len(other[name])} numbers")
            found = _first_difference(
                np.array(one[name], float), np.array(other[name], float), tolerance * scales.get(name, 0.0)
            )
            if found is not None:
                element = f", element {found}" if len(one[name]) > 1 else ""
                return Difference(f"{name}{element} of {where}", repr(one[name][found]), repr(other[name][found]))
    if len(left) != len(right):
        return Difference("the calls of strategy.backward", f"{len(left)} calls", f"{len(right)} calls")
    return None
