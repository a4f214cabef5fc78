"""Variables of TensorFlow itself that a step writes to: Keras does not know them, and neither do replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from duoka.errors import MismatchError
from duoka.frameworks.tensorflow.graphs import is_write, walk


def refuse_raw_variables(model: Any, known: Iterable[Any]) -> None:
    """While a step is traced, after its last operation. `known` are the variables that replicas merge.

    Every replica of a worker would write to the same one, and the workers to different ones. A step that runs eagerly
    is not looked at.
    """
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "captures"):
        return
    handles = {id(variable.value.handle) for variable in known}
    for operation, outside in walk(graph):
        handle = outside[0] if outside and is_write(operation) else None
        if handle is not None and handle.dtype == tf.resource and id(handle) not in handles:
            raise MismatchError(
                f"The step of {type(model).__name__} writes to a tf.Variable ({operation.name}) that is not Keras's.",
                why="replicas merge the variables of the model; others would differ between workers.",
                do="make it a weight of the model, self.add_weight(..., trainable=False), or a metric.",
            )
