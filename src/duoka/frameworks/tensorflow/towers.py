"""Towers: several copies of a model's computation in one process, each on a device, with averaged gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from duoka.devices.device import Device
from duoka.errors import DeviceError, MismatchError
from duoka.frameworks.tensorflow.logical_devices import divide, make_logical_cpus
from duoka.topology.tree import Node, fold

Pair = tuple[Any, Any]  # a gradient and its variable


def tower_devices(num_towers: int | Sequence[Device] | None = None) -> list[str]:
    """Names for `tf.device`, one for each tower: GPUs where there are enough, else as many logical CPUs.

    Given the virtual devices that one device was cut into, it makes them logical devices, with their limits.
    Logical devices are made here, which TensorFlow allows only before its first operation.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if isinstance(num_towers, Sequence) and not isinstance(num_towers, str):
        return divide(num_towers)
    is_asked_for = num_towers is not None
    if num_towers is None:
        num_towers = len(gpus) or 1
    if isinstance(num_towers, bool) or not isinstance(num_towers, int) or num_towers < 1:
        raise DeviceError(f"{num_towers!r} towers cannot be made.", do="give a whole number from 1 on.")
    if len(gpus) >= num_towers:
        return [f"/GPU:{index}" for index in range(num_towers)]
    if is_asked_for:
        print(f"duoka: {_say_cpus(len(gpus), num_towers)}", file=sys.stderr)
    make_logical_cpus(num_towers)
    return [f"/CPU:{index}" for index in range(num_towers)]


def _say_cpus(num_gpus: int, num_towers: int) -> str:
    here = f"{num_gpus} GPU{'' if num_gpus == 1 else 's'} here"
    return f"{here}: tower_devices({num_towers}) uses {num_towers} logical CPU{'' if num_towers == 1 else 's'}"


def average_gradients(tower_grads: Sequence[Sequence[Pair]]) -> list[Pair]:
    """The mean of the towers' gradients, for each variable: what a single tower would give for all rows at once.

    Each tower is a list of (gradient, variable), as `compute_gradients` gives it, or `zip(gradients, variables)`. A
    pure function, eager or inside a graph. Gradients are added in one fixed tree, so that equal inputs give equal bits;
    16-bit ones in 32 bits. A tower without a gradient for a variable counts as zero; where no tower has one, the
    answer has none. IndexedSlices stay slices, those of all towers one behind the other: repeated rows add up.
    """
    towers = [list(tower) for tower in tower_grads]
    _check(towers)
    return [
        (_mean([gradient for gradient, _ in pairs], pairs[0][1], place), pairs[0][1])
        for place, pairs in enumerate(zip(*towers, strict=True))
    ]


def _check(towers: list[list[Pair]]) -> None:
    if not towers:
        raise MismatchError("average_gradients was given no towers.", do="give a list with one list for each tower.")
    lengths = [len(tower) for tower in towers]
    if len(set(lengths)) > 1:
        raise MismatchError(
            f"The towers have different numbers of gradients: {', '.join(map(str, lengths))}.",
            do="compute the gradients of the same variables, in the same order, in every tower.",
        )
    for tower in towers:
        for pair in tower:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise MismatchError(
                    f"A tower holds a {type(pair).__name__} where a pair (gradient, variable) belongs.",
                    do="give zip(gradients, variables) for each tower.",
                )


def _mean(gradients: list[Any], variable: Any, place: int) -> Any:
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
        return _mean_of_slices(present, len(gradients))
    parts = [tf.convert_to_tensor(gradient) for gradient in present]
    shapes = [part.shape for part in parts]
    if not all(shape.is_compatible_with(shapes[0]) for shape in shapes):
        name = getattr(variable, "path", getattr(variable, "name", f"number {place}"))
        raise MismatchError(
            f"The towers' gradients of {name} have different shapes: {', '.join(map(str, shapes))}.",
            do="give the gradients in the same order in every tower.",
        )
    dtype = parts[0].dtype
    wide = tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
    leaves = tuple(Node(index, index + 1) for index in range(len(parts)))
    total = fold(len(parts), leaves, [_hide_shape(tf.cast(part, wide)) for part in parts], tf.add)
    # Multiplied: Grappler makes that of a division by a constant, with other bits than the division.
    mean = tf.cast(total * tf.constant(1 / len(gradients), wide), dtype)
    mean.set_shape(shapes[0])
    return mean


def _hide_shape(part: Any) -> Any:
    """From Grappler, which makes one AddN of additions whose shapes it knows to be equal: another order, other bits."""
    return tf.raw_ops.PlaceholderWithDefault(input=part, shape=tf.TensorShape(None))


def _mean_of_slices(parts: list[Any], num_towers: int) -> Any:
    values = tf.concat([part.values for part in parts], 0)
    indices = tf.concat([part.indices for part in parts], 0)
    return tf.IndexedSlices(values * tf.constant(1 / num_towers, values.dtype), indices, parts[0].dense_shape)
