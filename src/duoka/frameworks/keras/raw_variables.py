"""Variables of TensorFlow itself that a step writes to: Keras does not know them, and neither do replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from duoka.errors import MismatchError

_WRITES = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign")


def refuse_raw_variables(model: Any, known: Iterable[Any]) -> None:
    """While a step is traced, after its last operation. `known` are the variables that replicas merge.

    Every replica of a worker would write to the same one, and the workers to different ones.
    """
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "captures"):
        return  # eager: nothing was traced
    handles = {id(variable.value.handle) for variable in known}
    outside = {id(internal): external for external, internal in graph.captures}
    for operation in graph.get_operations():
        if not operation.type.startswith(_WRITES) or not operation.inputs:
            continue
        handle = outside.get(id(operation.inputs[0]))
        if handle is None or handle.dtype != tf.resource or id(handle) in handles:
            continue
        raise MismatchError(
            f"The step of {type(model).__name__} writes to a tf.Variable ({operation.name}) that is not Keras's.",
            why="replicas merge the variables of the model; one that Keras does not know would differ between workers.",
            do="make it a weight of the model, self.add_weight(..., trainable=False), or a metric.",
        )
