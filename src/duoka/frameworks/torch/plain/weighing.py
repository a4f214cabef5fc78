"""`strategy.weigh` in plain style: a loss that is a mean over something else than samples, or a sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from duoka.errors import MismatchError
from duoka.frameworks.torch.plain.share import Share


@dataclass(frozen=True)
class Weighed:
    """How the gradient of one backward is weighted."""

    factor: float | None = None  # None: by the worker's share of the batch
    is_count: bool = False  # the sum over workers is divided by the sum of their factors

    def by_samples(self, num_samples: int) -> Weighed:
        """Weighted by the number of samples: every worker draws batches of its own."""
        return Weighed(float(num_samples), is_count=True)


class _Noted:
    """A count, in the hands of a backward: the engine holds it as long as that runs, with all backwards inside it."""

    def __init__(self, count: float) -> None:
        self.count = count

    def __call__(self) -> None:
        pass


def _nothing() -> None:
    return None


class Weighing:
    """The count of the backward under way."""

    def __init__(self) -> None:
        self._noted: Callable[[], _Noted | None] = _nothing

    def weigh(self, loss: torch.Tensor, count: Any, share: Share | None) -> torch.Tensor:
        """The loss is a mean over `count` things, or, with None, a sum."""
        if share is None:
            return loss
        if count is None:
            if share.is_counted:
                raise MismatchError(
                    "strategy.weigh was called without a count in a loop over a loader with sharded=True.",
                    why="how many samples the other workers have is not known before the backward.",
                    do="pass a mean and its count: strategy.weigh(total / count, count).",
                )
            # The gradient is multiplied by the share's weight later: a sum over workers is left.
            return loss / share.weight if share.weight else loss
        number = float(count)
        if not 0 <= number < math.inf:
            raise MismatchError(f"strategy.weigh was passed the count {count}.", do="pass how many things it is.")
        weighed: torch.Tensor = _Weighed.apply(loss, self, number)
        return weighed

    def note(self, count: float) -> None:
        """A backward runs through a loss with this count."""
        if self.factor not in (None, count):
            raise MismatchError(
                f"strategy.weigh was passed two counts, {self.factor:g} and {count:g}, in one backward.",
                do="call backward for each term, or train by strategy.backward, which weighs every term by itself.",
            )
        noted = _Noted(count)
        self._noted = ref(noted)
        torch.autograd.Variable._execution_engine.queue_callback(noted)

    @property
    def factor(self) -> float | None:
        """Of the backward under way, if its loss has a count."""
        noted = self._noted()
        return None if noted is None else noted.count

    def read(self) -> Weighed:
        """How the gradients of the backward under way are weighted."""
        return Weighed() if self.factor is None else Weighed(self.factor, is_count=True)


class _Weighed(torch.autograd.Function):
    """The loss itself. Its backward tells which count belongs to it: a loss that is only printed has none."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, weighing: Weighing, count: float) -> torch.Tensor:
        ctx.weighing, ctx.count = weighing, count
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.weighing.note(ctx.count)
        return gradient, None, None
