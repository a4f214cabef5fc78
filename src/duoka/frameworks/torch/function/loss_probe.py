"""Whether a function's loss is a mean over samples: it runs on a few of them in eval mode, and the losses are compared.

Nothing of it is exchanged: it runs on the worker of replica 0, and its verdict is an error of that replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from duoka.errors import MismatchError
from duoka.frameworks.additivity import NUM_ROUNDS, NUM_SEEDS, TOLERANCES, Finding, Terms, is_beyond_chance, probe
from duoka.frameworks.torch.function.in_place import read_versions, refuse_changed_arguments
from duoka.frameworks.torch.function.metric_probe import MetricProbe
from duoka.frameworks.torch.function.returned import Returned, read
from duoka.frameworks.torch.generators import digest_generators
from duoka.frameworks.torch.randomness import seeded

Tell = Callable[..., None]
_SUMS = (torch.ops.aten.sum, torch.ops.aten.mean)
SEED = 0x5EED


class RaisedInEvalMode(Exception):
    """The function raised: its error is the cause."""


class LossProbe:
    """Compares the losses of a function on two parts of some samples, and on both together."""

    def __init__(
        self,
        function: Callable[..., Any],
        title: str,
        cut: Callable[[int, int], Sequence[Any]],
        sizes: tuple[int, int],
        after_run: Callable[[], None] = lambda: None,
        first_loss: float = 0.0,
    ) -> None:
        """`cut(start, stop)` returns the arguments for these samples. `after_run` may raise."""
        self._first_loss = first_loss
        self._function, self._title, self._cut, self._sizes = function, title, cut, sizes
        self._after_run, self._seed = after_run, SEED
        self._draws, self._dtype = False, "float32"
        self._metrics = MetricProbe()

    def find(self, models: Sequence[nn.Module], tell: Tell) -> MismatchError | None:
        """Return an error if the loss is not a mean over samples.

        Raises:
            RaisedInEvalMode: the function cannot be looked at.
        """
        # With a graph, although nothing is differentiated here: a gradient penalty calls autograd.grad itself.
        with torch.enable_grad(), in_eval_mode(models):
            finding = probe(self._evaluate, self._sizes)
            if finding.difference <= TOLERANCES[self._dtype]:
                return None
            with _Terms() as terms:
                self._evaluate(0, sum(self._sizes))
            dtype = "bfloat16" if terms.is_16_bit else self._dtype
            if not finding.is_beyond_rounding(dtype, max(terms.largest, self._first_loss)):
                return None
            if self._draws and not all(is_beyond_chance(self._probe_with_seeds(n)) for n in range(NUM_ROUNDS)):
                tell(
                    f"{self._title} draws random numbers, so whether its loss is a mean over samples is not checked;"
                    " return strategy.weigh(loss) for a sum, strategy.weigh(loss, count) for a mean over other things"
                )
                return None
        return _not_additive(finding, self._sizes, self._title)

    def tell_of_metrics(self, tell: Tell) -> None:
        """Tell of a metric that depends on the number of replicas. It trains nothing wrongly: it may be meant."""
        found = None if self._draws else self._metrics.find(self._sizes)
        if found is not None:
            name, together, combined = found
            tell(
                f"the metric{f' {name!r}' if name else ''} of {self._title} depends on the number of replicas: on"
                f" {sum(self._sizes)} samples it is {together:.6g}, and from {self._sizes[0]} and {self._sizes[1]} of"
                f" them it would be {combined:.6g}; return (sum, count), or strategy.rows(tensor) and compute it from"
                " the rows after strategy.backward"
            )

    def _probe_with_seeds(self, number: int) -> list[Finding]:
        findings = []
        for seed in range(NUM_SEEDS):
            self._seed = SEED + number * NUM_SEEDS + seed
            findings.append(probe(self._evaluate, self._sizes))
        return findings

    def _evaluate(self, start: int, stop: int) -> Terms:
        data = self._cut(start, stop)
        versions = read_versions(data)
        try:
            with seeded(self._seed):
                before = digest_generators()
                returned = read(self._function(*data), needs_graph=False)
                self._draws |= digest_generators() != before
            self._metrics.note(returned.metrics, start, stop)
        except Exception as error:
            self._after_run()
            raise RaisedInEvalMode from error
        self._after_run()
        if read_versions(data) != versions:
            refuse_changed_arguments(data, versions, self._title)
        self._dtype = _dtype_of(returned)
        return _terms_of(returned)


class _Terms(TorchDispatchMode):
    """Sees what a loss is made of: the largest single number, and whether anything is computed in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.is_16_bit = 0.0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.is_16_bit |= value.element_size() == 2
                if not value.ndim:
                    # What is added up may cancel out: the sum alone does not show how it was rounded.
                    parts = args[0] if func.overloadpacket in _SUMS else value
                    number = parts.abs().max().item() if parts.numel() else 0.0
                    self.largest = max(self.largest, number if number < float("inf") else 0.0)
        return result


def _not_additive(finding: Finding, sizes: tuple[int, int], title: str) -> MismatchError:
    return MismatchError(
        f"The loss of {title} is not a mean over samples.",
        why=f"on {sum(sizes)} samples it is {finding.together:.6g}; from {sizes[0]} and {sizes[1]} of them, weighted by"
        f" their numbers, it would be {finding.combined:.6g} (relative difference {finding.difference:.1e}).",
        do="return strategy.weigh(loss, count) for a mean over `count` other things (tokens, pixels, class weights),\n"
        "strategy.weigh(loss) for a sum over samples; or divide by the number of samples.\n"
        "A loss that compares samples with each other (contrastive) cannot be split: use one replica, or\n"
        "strategy.rows to gather its inputs. check=False leaves this check out.",
    )


def _terms_of(returned: Returned) -> Terms:
    means = sum(term.value.item() for term in returned.terms if term.kind == "samples")
    sums = sum(term.value.item() for term in returned.terms if term.kind == "sum")
    counted = tuple((term.value.item(), term.number) for term in returned.terms if term.kind == "count")
    return means, sums, counted


def _dtype_of(returned: Returned) -> str:
    value = returned.terms[0].value
    dtype = str(value.dtype).removeprefix("torch.")
    if torch.is_autocast_enabled(value.device.type):
        return "bfloat16"
    return dtype if dtype in TOLERANCES else "float32"


@contextmanager
def in_eval_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Every module's flag is put back; layers frozen by hand within a model in training stay frozen."""
    flags = [(module, module.training) for model in models for module in model.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, is_training in flags:
            module.training = is_training
