"""Every optimizer's `apply`, seen by one function while a step runs: a step may use optimizers that nobody knows of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from keras.src.optimizers.base_optimizer import BaseOptimizer

from duoka.frameworks.replacing import shadowing
from duoka.frameworks.switching import places_of, switching

Exchange = Callable[[list[Any]], list[Any]]


class Applying:
    """Around one run, or one tracing, of a step: gradients go through `exchange` before they are applied.

    The optimizers that an optimizer calls itself (behind a loss scale, say) get what it gives them. So does an `apply`
    that the user has put on one of these `optimizers`, by name: it may hold the class's own, which cannot be seen.
    """

    def __init__(self, exchange: Exchange, optimizers: Mapping[str, Any]) -> None:
        self._exchange, self._optimizers = exchange, optimizers
        self.is_inside = False  # of an optimizer
        self.has_applied = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        calls = {"apply": self._apply, "stateless_apply": self._stateless_apply}
        with (
            switching([(kind, name, calls[name]) for kind, name in places_of(BaseOptimizer, tuple(calls))]),
            ExitStack() as shadows,
        ):
            for optimizer in self._optimizers.values():
                if "apply" in vars(optimizer):
                    shadows.enter_context(shadowing(optimizer, {"apply": self._before(vars(optimizer)["apply"])}))
            yield

    def _before(self, own: Any) -> Any:
        def apply(grads: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            with self._entering() as is_first:
                return own(self._exchange(list(grads)) if is_first else grads, *args, **kwargs)

        return apply

    def _apply(self, own: Any, optimizer: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        with self._entering() as is_first:
            grads = self._exchange(list(grads)) if is_first else grads
            return own(optimizer, grads, trainable_variables)

    def _stateless_apply(
        self, own: Any, optimizer: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        with self._entering() as is_first:
            grads = self._exchange(list(grads)) if is_first else grads
            return own(optimizer, optimizer_variables, grads, trainable_variables)

    @contextmanager
    def _entering(self) -> Iterator[bool]:
        was_inside, self.is_inside, self.has_applied = self.is_inside, True, True
        try:
            yield not was_inside
        finally:
            self.is_inside = was_inside
