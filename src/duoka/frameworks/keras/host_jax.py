"""Out of a function compiled by JAX, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from duoka.collectives.arrays import Array
from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.keras.host import Backward, Forward, Host, Shape


class JaxHost(Host):
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def call(
        self, function: Callable[..., Any], arguments: Sequence[Any], like: Sequence[tuple[Shape, Any]]
    ) -> list[Any]:
        surfacing = self._wire.surfacing(function)
        zeros = [np.zeros(tuple(size or 0 for size in shape), dtype) for shape, dtype in like]

        def run(*arrays: Any) -> list[Array]:
            # An error must not leave the call: JAX would go on to fail at the next one, and at the end of the process.
            # The step runs to its end on zeros, and its results are thrown away.
            if self._wire.failure is not None:
                return zeros
            try:
                return list(surfacing(*arrays))
            except BaseException:
                return zeros

        kinds = [jax.ShapeDtypeStruct(zero.shape, zero.dtype) for zero in zeros]
        return list(io_callback(run, kinds, *map(jax.lax.stop_gradient, arguments), ordered=True))

    def differentiable(self, forward: Forward, backward: Backward) -> Callable[..., tuple[Any, ...]]:
        @jax.custom_vjp
        def function(*arguments: Any) -> tuple[Any, ...]:
            return forward(*arguments)[0]

        def first_pass(*arguments: Any) -> Any:
            results, kept = forward(*arguments)
            return results, (kept, arguments[1:])

        def second_pass(kept: Any, upstream: Any) -> Any:
            return (backward(kept[0], upstream), *map(jax.numpy.zeros_like, kept[1]))

        function.defvjp(first_pass, second_pass)
        return function
