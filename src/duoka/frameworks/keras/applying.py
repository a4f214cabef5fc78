"""Every optimizer's `apply`, seen by one function while a step runs: a step may use optimizers that nobody knows of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keras.src.optimizers.base_optimizer import BaseOptimizer

from duoka.frameworks.replacing import definitions, for_this_thread, replacing

Exchange = Callable[[list[Any]], list[Any]]


class Applying:
    """Around one run, or one tracing, of a step: gradients go through `exchange` before they are applied.

    The optimizers that an optimizer calls itself (behind a loss scale, say) get what it gives them.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.is_inside = False  # of an optimizer
        self.has_applied = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        makers = {"apply": self._make_apply, "stateless_apply": self._make_stateless_apply}
        known = definitions(BaseOptimizer, list(makers))
        with replacing([(kind, name, for_this_thread(makers[name](method), method)) for kind, name, method in known]):
            yield

    def _make_apply(self, original: Any) -> Any:
        def apply(optimizer: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
            with self._entering() as is_first:
                grads = self._exchange(list(grads)) if is_first else grads
                return original(optimizer, grads, trainable_variables)

        return apply

    def _make_stateless_apply(self, original: Any) -> Any:
        def stateless_apply(optimizer: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            with self._entering() as is_first:
                grads = self._exchange(list(grads)) if is_first else grads
                return original(optimizer, optimizer_variables, grads, trainable_variables)

        return stateless_apply

    @contextmanager
    def _entering(self) -> Iterator[bool]:
        was_inside, self.is_inside, self.has_applied = self.is_inside, True, True
        try:
            yield not was_inside
        finally:
            self.is_inside = was_inside
