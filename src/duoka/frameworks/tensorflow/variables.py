"""The variables that a step writes to by itself, and how what replicas make of them is merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from duoka.frameworks.replacing import definitions, replacing
from duoka.frameworks.tensorflow.graphs import drawn_from, summing_up, written_by

_WRITERS = (
    "assign",
    "assign_add",
    "assign_sub",
    "scatter_sub",
    "scatter_add",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_div",
    "scatter_update",
    "batch_scatter_update",
    "scatter_nd_sub",
    "scatter_nd_add",
    "scatter_nd_update",
    "scatter_nd_max",
    "scatter_nd_min",
    "_strided_slice_assign",
)


class Merge(Enum):
    MEAN = "mean"  # weighted by rows
    SUM = "sum"  # of what each replica adds
    FIRST = "first"  # replica 0's
    COUNTED = "counted"  # not at all: an optimizer counts its updates in it


def merge_of(variable: Any, *, is_seed: bool = False, is_counted: bool = False) -> Merge:
    """As its `aggregation` says. Without one: floats to a mean, as for BatchNorm; anything else is replica 0's."""
    if is_counted:
        return Merge.COUNTED
    if is_seed or variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
        return Merge.FIRST
    if variable.aggregation == tf.VariableAggregation.SUM:
        return Merge.SUM
    return Merge.MEAN if variable.dtype.is_floating else Merge.FIRST


def say_written(variable: Any, name: str) -> str:
    return (
        f"{name} writes to the weight {variable.name} without an optimizer that could be seen: it becomes the mean of"
        " what replicas make of it, which is the value of one device for plain gradient descent only"
    )


def is_undeclared(variable: Any) -> bool:
    """Nobody has said how it is to be merged."""
    return bool(variable.aggregation == tf.VariableAggregation.NONE)


def is_said_to_be_first(variable: Any) -> bool:
    """Of one that is replica 0's: somebody has said so. A mean of whole numbers is none, and they come here, too."""
    return bool(variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA)


def is_doubtful_sum(variable: Any) -> bool:
    """When something is added to it: a sum over rows, which is merged as a mean?"""
    return merge_of(variable) is Merge.MEAN and is_undeclared(variable) and not variable.trainable


def say_summed(variable: Any, name: str) -> str:
    return (
        f"{name} adds to {variable.name}, which has no aggregation: it becomes the mean of what replicas make of it,"
        " weighted by rows; a sum over all rows needs aggregation=tf.VariableAggregation.SUM"
    )


def say_reset(variable: Any, name: str) -> str:
    return (
        f"{variable.name} is not only added to in {name}: what replicas add is added up, which is not the value of one"
        " device (reset metrics outside of strategy.run)"
    )


@contextmanager
def watching_resets(see: Callable[[Any], None]) -> Iterator[None]:
    """Outside of graphs: `see` gets the variables of each metric of Keras that is reset."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def reset_state(metric: Any) -> Any:
            for variable in metric.variables:
                see(raw(variable))
            return original(metric)

        return reset_state

    known = definitions(keras.metrics.Metric, ["reset_state"])
    with replacing([(kind, name, make(method)) for kind, name, method in known]):
        yield


@contextmanager
def watching_writes(
    see: Callable[[Any], None], see_sum: Callable[[Any], None], see_generator: Callable[[Any], None]
) -> Iterator[None]:
    """Outside of graphs: `see` gets each variable before it is written to, by a `tf.function` too.

    `see_sum` gets those that something is added to which is no plain number, `see_generator` the states of generators
    that a `tf.function` draws from.
    """

    def make(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def write(variable: Any, *args: Any, **kwargs: Any) -> Any:
            see(variable)
            if name == "assign_add" and not any(isinstance(given, (int, float)) for given in args[:1]):
                see_sum(variable)
            return original(variable, *args, **kwargs)

        return write

    call = Function.__call__

    def call_seen(function: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() and not tf.config.functions_run_eagerly():
            graph = function.get_concrete_function(*args, **kwargs).graph
            for variable in drawn_from(graph):
                see_generator(variable)
            for variable in written_by(graph):
                see(variable)
            for variable in summing_up(graph):
                see_sum(variable)
        return call(function, *args, **kwargs)

    writers = [(kind, name, make(name, method)) for kind, name, method in definitions(BaseResourceVariable, _WRITERS)]
    with replacing([*writers, (Function, "__call__", call_seen)]):
        yield


def raw(variable: Any) -> Any:
    """The TensorFlow variable behind one of Keras."""
    return variable if isinstance(variable, tf.Variable) else variable.value
