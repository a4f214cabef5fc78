"""`strategy.weigh` in plain style: a loss that is a mean over something else than samples, or a sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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


class Weighing:
    """The count of the backward under way."""

    def __init__(self) -> None:
        self._count: float | None = None

    def weigh(self, loss: torch.Tensor, count: Any, share: Share | None) -> torch.Tensor:
        """The loss is a mean over `count` things, or, with None, a sum."""
        if share is None:
            return loss
        if count is None:
            # The gradient is multiplied by the share's weight later: a sum over workers is left.
            return loss / share.weight if share.weight else loss
        number = float(count)
        if not 0 <= number < math.inf:
            raise MismatchError(f"strategy.weigh was passed the count {count}.", do="pass how many things it is.")
        weighed: torch.Tensor = _Weighed.apply(loss, self, number)
        return weighed

    def note(self, count: float) -> None:
        """A backward runs through a loss with this count."""
        if self._count not in (None, count):
            raise MismatchError(
                f"strategy.weigh was passed two counts, {self._count:g} and {count:g}, in one backward.",
                do="call backward for each term, or train by strategy.backward, which weighs every term by itself.",
            )
        self._count = count

    @property
    def factor(self) -> float | None:
        """Of the backward under way, if its loss has a count."""
        return self._count

    def take(self) -> Weighed:
        """The backward has ended."""
        count, self._count = self._count, None
        return Weighed() if count is None else Weighed(count, is_count=True)


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
