"""The contract of a way out of a compiled step: functions of arrays, called in order, with gradients if asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

Shape = Sequence[int | None]
Forward = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]  # results, and what the gradient needs
Backward = Callable[[Sequence[Any], Sequence[Any]], Any]  # of the first argument, from what was kept and upstream


class Host(ABC):
    @abstractmethod
    def call(
        self, function: Callable[..., Any], arguments: Sequence[Any], like: Sequence[tuple[Shape, Any]]
    ) -> list[Any]:
        """Tensors of these shapes and types, from a function of arrays. All workers make their calls in one order."""

    @abstractmethod
    def differentiable(self, forward: Forward, backward: Backward) -> Callable[..., tuple[Any, ...]]:
        """A function of tensors that is differentiated by its first one, in the way that `backward` says."""
