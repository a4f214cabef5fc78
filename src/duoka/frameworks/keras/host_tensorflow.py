"""Out of a TensorFlow graph, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.keras.host import Backward, Forward, Host, Shape


class TensorFlowHost(Host):
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._last: tuple[Any, Any] = (None, None)  # the graph that is being built, and its last call

    def call(
        self, function: Callable[..., Any], arguments: Sequence[Any], like: Sequence[tuple[Shape, Any]]
    ) -> list[Any]:
        types = [tf.as_dtype(dtype) for _, dtype in like]
        surfacing = self._wire.surfacing(function)
        if tf.executing_eagerly():
            results = _as_list(tf.numpy_function(surfacing, list(arguments), types))
        else:
            # In the order of the step's text: TensorFlow itself runs what does not depend on each other in any order.
            graph = tf.compat.v1.get_default_graph()
            before = [self._last[1]] if self._last[0] is graph else []
            with tf.control_dependencies(before):
                results = _as_list(tf.numpy_function(surfacing, list(arguments), types))
            self.follow(results[0].op)
        for result, (shape, _) in zip(results, like, strict=True):
            result.set_shape(shape)
        return results

    @property
    def is_first_in_graph(self) -> bool:
        """Whether nothing has been called out of the graph that is being built."""
        return self._last[0] is not tf.compat.v1.get_default_graph()

    def follow(self, operation: Any) -> None:
        """In the graph that is being built, the next call comes after this."""
        self._last = (tf.compat.v1.get_default_graph(), operation)

    def differentiable(self, forward: Forward, backward: Backward) -> Callable[..., tuple[Any, ...]]:
        @tf.custom_gradient
        def function(*arguments: Any) -> Any:
            results, kept = forward(*arguments)

            def gradient(*upstream: Any) -> Any:
                return [backward(kept, upstream), *[None] * (len(arguments) - 1)]

            return list(results), gradient

        return lambda *arguments: tuple(function(*arguments))


def _as_list(results: Any) -> list[Any]:
    """A list of one tensor comes as the tensor."""
    return list(results) if isinstance(results, (list, tuple)) else [results]
