"""BatchNorm over the whole global batch, forward and backward: its moments are those of all workers' rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keras import backend, layers, ops

from duoka.frameworks.exchange.wire import Wire
from duoka.frameworks.keras.host import Host
from duoka.frameworks.switching import switching


@contextmanager
def synchronising(host: Host, wire: Wire, *, all_layers: bool) -> Iterator[None]:
    """Around one run, or one tracing, of a training step: all layers, or those with synchronized=True.

    Keras asks `_moments` only where it trains.
    """

    def moments(own: Callable[..., Any], layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        if all_layers or layer.synchronized:
            return _moments(layer, inputs, mask, host, wire)
        return own(layer, inputs, mask)

    with switching([(layers.BatchNormalization, "_moments", moments)]):
        yield


def _moments(layer: Any, inputs: Any, mask: Any, host: Host, wire: Wire) -> tuple[Any, Any]:
    axes, axis = layer._reduction_axes, layer.axis
    num_channels = inputs.shape[axis]
    shape = [1] * len(inputs.shape)
    shape[axis] = num_channels
    like = [((num_channels,), backend.standardize_dtype(inputs.dtype))] * 3

    def forward(x: Any, weights: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        count = ops.sum(weights, axes)
        own_mean = ops.sum(x * weights, axes) / ops.maximum(count, 1)
        squares = ops.sum(ops.square(x - ops.reshape(own_mean, shape)) * weights, axes)
        mean, variance, total = host.call(wire.merge_moments, [own_mean, squares, count], like)
        return (mean, variance), (x, weights, mean, total)

    def backward(kept: Sequence[Any], upstream: Sequence[Any]) -> Any:
        x, weights, mean, total = kept
        of_mean, of_variance = host.call(wire.sum_moment_gradients, upstream, like[:2])
        scale = 1 / ops.maximum(total, 1)
        centred = x - ops.reshape(mean, shape)
        return weights * (ops.reshape(of_mean * scale, shape) + centred * ops.reshape(2 * of_variance * scale, shape))

    mean, variance = host.differentiable(forward, backward)(inputs, _weights(inputs, mask))
    return mean, variance


def _weights(inputs: Any, mask: Any) -> Any:
    """1 for each value that counts, 0 for those that a mask hides."""
    if mask is None:
        return ops.ones_like(inputs)
    return ops.broadcast_to(ops.cast(ops.expand_dims(mask, -1), inputs.dtype), ops.shape(inputs))
