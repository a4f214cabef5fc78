"""What a replica's function returns: a loss, or a loss and metrics; and how those of all replicas become one.

A loss is a mean over samples, unless its terms were made by `strategy.weigh`. Metrics are pairs (sum, count): a plain
number is a mean over samples. `strategy.rows` is one row per sample.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from duoka.errors import MismatchError
from duoka.frameworks.torch.tensors import as_bytes

ALONE = ""  # the name of a metric that was returned without one
_DO_METRICS = (
    "return (loss, metric) or (loss, {name: metric}). A metric is a number (a mean over samples), a pair (sum, count),"
    " or strategy.rows(tensor)."
)
_DO_LOSS = "return a scalar tensor that depends on the model's parameters: a mean over samples."


@dataclass(frozen=True)
class Rows:
    """One row per sample of a replica; on every worker it comes back whole and in the order of the batch."""

    tensor: torch.Tensor


class Weighed:
    """Terms of a loss, each with what it is a mean over. It can be added up and scaled, as a tensor can."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = tuple(terms)

    def __add__(self, other: Any) -> Weighed:
        return Weighed([*self.terms, *_terms_of(other)])

    __radd__ = __add__

    def __sub__(self, other: Any) -> Weighed:
        return self + other * -1.0

    def __rsub__(self, other: Any) -> Weighed:
        return self * -1.0 + other

    def __neg__(self) -> Weighed:
        return self * -1.0

    def __mul__(self, factor: Any) -> Weighed:
        return Weighed([Term(term.value * factor, term.kind, term.count) for term in self.terms])

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Weighed:
        return Weighed([Term(term.value / divisor, term.kind, term.count) for term in self.terms])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _is_no_tensor(f".{name} was read from")

    def __float__(self) -> float:
        raise _is_no_tensor("float() was called with")


def _is_no_tensor(what: str) -> MismatchError:
    return MismatchError(
        f"{what} the result of strategy.weigh, which is not a tensor.",
        why="its value is known when all replicas have been counted: strategy.backward returns it.",
        do="keep the term before strategy.weigh and use that: loss = ...; return strategy.weigh(loss, count),"
        " {'loss': (loss * count, count)}.",
    )


class Term(NamedTuple):
    """A part of a loss: a mean over samples, a sum, or a mean over what was counted."""

    value: torch.Tensor
    kind: str  # "samples", "sum" or "count"
    count: Any = None

    @property
    def number(self) -> float:
        return float(self.count)


def weigh(value: Any, count: Any = None) -> Weighed:
    """See `strategy.weigh`."""
    if not isinstance(value, torch.Tensor):
        raise MismatchError(
            f"strategy.weigh was given a {type(value).__name__}, not a tensor.",
            do="call it with a term of the loss: strategy.weigh(term, count), or strategy.weigh(term) for a sum.",
        )
    if count is None:
        return Weighed([Term(value, "sum")])
    if isinstance(count, torch.Tensor) and count.requires_grad:
        raise MismatchError(
            "strategy.weigh was given a count that requires a gradient.",
            why="terms are weighed after the backward of each replica, which does not reach the counts.",
            do="detach it: strategy.weigh(term, count.detach()).",
        )
    if not 0 <= float(count) < math.inf:
        raise MismatchError(
            f"strategy.weigh was given a count of {count}.",
            do="pass the number of things that the term is a mean over.",
        )
    return Weighed([Term(value, "count", count)])


@dataclass
class Returned:
    """One replica's loss and metrics."""

    terms: list[Term]
    metrics: dict[str, Any] = field(default_factory=dict)
    has_metrics: bool = False

    def groups(self) -> tuple[str, list[list[Term]]]:
        """Return terms by what divides them: first those whose weight is known ("k"), then one group per count ("c").

        >>> mean, tokens = Term(torch.tensor(1.0), "samples"), Term(torch.tensor(2.0), "count", 7)
        >>> Returned([tokens, mean]).groups()[0]
        'kc'
        """
        if len(self.terms) == 1 and self.terms[0].kind != "count":
            return "k", [self.terms]
        known = [term for term in self.terms if term.kind != "count"]
        counted: dict[int, list[Term]] = {}
        for term in self.terms:
            if term.kind == "count":
                # Equal numbers may be different counts that happen to be equal on this replica.
                key = id(term.count) if isinstance(term.count, torch.Tensor) else id(term)
                counted.setdefault(key, []).append(term)
        groups = [known, *counted.values()] if known else [*counted.values()]
        return "k" * bool(known) + "c" * len(counted), groups


def read(returned: Any, *, needs_graph: bool = True) -> Returned:
    """Check what a function returned."""
    loss, metrics = returned, None
    if isinstance(returned, tuple):
        if len(returned) != 2:
            raise MismatchError(f"The function returned {len(returned)} values.", do=_DO_METRICS)
        loss, metrics = returned
    # A plain tensor is not worth a call: this happens in every step.
    terms = [Term(loss, "samples")] if isinstance(loss, torch.Tensor) else list(_terms_of(loss))
    has_graph = False
    for term in terms:
        _check_term(term)
        has_graph |= term.value.requires_grad
    if needs_graph and not has_graph:
        raise MismatchError(
            "The function returned a loss without a graph: there is nothing to differentiate.",
            why="it was computed under torch.no_grad(), detached, or no parameter took part in it.",
            do=_DO_LOSS,
        )
    result = Returned(terms, has_metrics=isinstance(returned, tuple))
    if result.has_metrics:
        result.metrics = dict(metrics) if isinstance(metrics, Mapping) else {ALONE: metrics}
        if isinstance(metrics, Mapping) and (ALONE in metrics or any(not isinstance(name, str) for name in metrics)):
            raise MismatchError("Names of metrics must be strings, and not empty.", do=_DO_METRICS)
    return result


def _terms_of(loss: Any) -> Sequence[Term]:
    if isinstance(loss, Weighed):
        return loss.terms
    if isinstance(loss, torch.Tensor):
        return [Term(loss, "samples")]
    if isinstance(loss, int | float) and loss == 0:
        return []  # sum([...]) begins with it
    raise MismatchError(f"The function returned a {type(loss).__name__}, not a loss.", do=_DO_LOSS)


def _check_term(term: Term) -> None:
    value = term.value
    if value.numel() != 1:
        raise MismatchError(
            f"The function returned a loss of shape {tuple(value.shape)}, not a number.",
            do="return its mean, loss.mean(); or a sum over samples as strategy.weigh(loss.sum()).",
        )
    if value.is_complex():
        raise MismatchError("The function returned a complex loss.", do=_DO_LOSS)


@dataclass(frozen=True)
class Kind:
    """How one metric looks: the shapes of its sum and count, or the type and shape of one row."""

    name: str
    sums: tuple[int, ...]
    counts: tuple[int, ...]
    row_dtype: str = ""  # of rows only

    @property
    def num_numbers(self) -> int:
        return 0 if self.row_dtype else math.prod(self.sums) + math.prod(self.counts)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.sums) * _dtype(self.row_dtype).itemsize if self.row_dtype else 0


class Measured:
    """One replica's metrics as numbers in float64, and rows as bytes."""

    def __init__(self, kinds: Sequence[Kind], numbers: np.ndarray, rows: Sequence[np.ndarray]) -> None:
        self.kinds, self.numbers, self.rows = tuple(kinds), numbers, list(rows)

    @classmethod
    def of(cls, metrics: Mapping[str, Any], num_samples: int) -> Measured:
        kinds, numbers, rows = [], [np.empty(0)], []
        for name, metric in metrics.items():
            if isinstance(metric, Rows):
                kinds.append(_kind_of_rows(name, metric.tensor, num_samples))
                # A copy: the script, or the next replica, may change what it came from.
                rows.append(as_bytes(metric.tensor).to("cpu", copy=True).numpy())
                continue
            sums, counts = _read_pair(name, metric, num_samples)
            kinds.append(Kind(name, sums.shape, counts.shape))
            numbers += [sums.reshape(-1), counts.reshape(-1)]
        return cls(kinds, np.concatenate(numbers), rows)


NO_METRICS = Measured((), np.empty(0), ())


def encode(kinds: Sequence[Kind]) -> bytes:
    return json.dumps([[kind.name, kind.sums, kind.counts, kind.row_dtype] for kind in kinds]).encode()


def decode(text: bytes) -> list[Kind]:
    return [Kind(name, tuple(sums), tuple(counts), dtype) for name, sums, counts, dtype in json.loads(text)]


def combine(kinds: Sequence[Kind], numbers: np.ndarray, rows: Sequence[np.ndarray], device: torch.device) -> Any:
    """Return the metrics of the whole batch from the sums over all replicas, as the script sees them."""
    answers: dict[str, Any] = {}
    start, parts = 0, iter(rows)
    for kind in kinds:
        if kind.row_dtype:
            flat = torch.from_numpy(next(parts)).view(_dtype(kind.row_dtype))
            answers[kind.name] = flat.view(-1, *kind.sums).to(device)
            continue
        middle = start + math.prod(kind.sums)
        end = middle + math.prod(kind.counts)
        sums, counts = numbers[start:middle].reshape(kind.sums), numbers[middle:end].reshape(kind.counts)
        means = np.full(kind.sums, np.nan)
        np.divide(sums, counts, out=means, where=np.broadcast_to(counts != 0, kind.sums))
        answers[kind.name] = torch.from_numpy(means).to(device) if kind.sums else float(means)
        start = end
    return answers[ALONE] if list(answers) == [ALONE] else answers


def _kind_of_rows(name: str, tensor: Any, num_samples: int) -> Kind:
    if not isinstance(tensor, torch.Tensor) or not tensor.ndim or len(tensor) != num_samples or not tensor.numel():
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise MismatchError(
            f"strategy.rows was given {shape}{_of(name)} for {num_samples} samples.",
            do="pass a tensor with one row per sample of the replica (dimension 0).",
        )
    return Kind(name, tuple(tensor.shape[1:]), (), str(tensor.dtype).removeprefix("torch."))


def _read_pair(name: str, metric: Any, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(metric, tuple | list):
        if len(metric) != 2:
            raise MismatchError(f"The function returned {len(metric)} values as a metric{_of(name)}.", do=_DO_METRICS)
        sums, counts = (_as_numbers(name, part) for part in metric)
        if counts.shape not in ((), sums.shape):
            raise MismatchError(
                f"The function returned a sum of shape {sums.shape} and a count of shape {counts.shape}{_of(name)}.",
                do="return one count, or one for each number of the sum.",
            )
        if not (np.isfinite(counts).all() and (counts >= 0).all()):
            raise MismatchError(
                f"The function returned a count of {counts.tolist()}{_of(name)}.",
                do="return the sum first and then the count, which is the number of things summed over.",
            )
        return sums, counts
    mean = _as_numbers(name, metric)
    if mean.ndim:
        raise _not_a_number(name, f"a value of shape {mean.shape}")
    return mean * num_samples, np.array(float(num_samples))


def refuse_samples(metrics: Mapping[str, Any], num_samples: int) -> None:
    """Raise where the count of a pair has an entry per sample, as in (predictions, targets).

    Looked at in the first calls: a last batch may have as many samples as there are classes.
    """
    for name, metric in metrics.items():
        if isinstance(metric, tuple | list) and len(metric) == 2:
            shape: Sequence[int] = getattr(metric[1], "shape", ())
            if len(shape) and shape[0] == num_samples > 1:
                raise _not_a_number(name, f"a sum and a count of shape {tuple(shape)} for {num_samples} samples")


def _not_a_number(name: str, what: str) -> MismatchError:
    return MismatchError(
        f"The function returned {what} as a metric{_of(name)}, not a number.",
        why="metrics are added up over replicas: entry i of one replica would be added to entry i of another.",
        do="for one row per sample return strategy.rows(t); for a vector return (sum, count), with a number as its"
        " count.",
    )


def _as_numbers(name: str, value: Any) -> np.ndarray:
    if isinstance(value, Weighed):
        raise _is_no_tensor(f"The metric{_of(name)} is")
    if isinstance(value, torch.Tensor) and not value.is_complex() and value.layout is torch.strided:
        return value.detach().to("cpu", torch.float64).numpy()
    if isinstance(value, bool | int | float | np.generic | np.ndarray) and np.asarray(value).dtype.kind in "biuf":
        return np.asarray(value, np.float64)
    what = f"{value.dtype} tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    raise MismatchError(f"The function returned a {what} as a metric{_of(name)}, not a number.", do=_DO_METRICS)


def _of(name: str) -> str:
    return f" for {name!r}" if name else ""


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
