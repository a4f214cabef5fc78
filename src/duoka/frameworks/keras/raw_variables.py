"""Variables of TensorFlow itself that a step writes to: Keras does not know them, and neither do replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from duoka.errors import MismatchError

_WRITES = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign")
# Operations that run other graphs: where those are named, and how many inputs come before theirs.
_CALLS = {
    "PartitionedCall": (("f",), 0),
    "StatefulPartitionedCall": (("f",), 0),
    "If": (("then_branch", "else_branch"), 1),
    "While": (("cond", "body"), 0),
}


def refuse_raw_variables(model: Any, known: Iterable[Any]) -> None:
    """While a step is traced, after its last operation. `known` are the variables that replicas merge.

    Every replica of a worker would write to the same one, and the workers to different ones. A step that runs eagerly
    is not looked at.
    """
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "captures"):
        return
    handles = {id(variable.value.handle) for variable in known}
    for operation, handle in _writes(graph, {id(internal): external for external, internal in graph.captures}):
        if handle is not None and handle.dtype == tf.resource and id(handle) not in handles:
            raise MismatchError(
                f"The step of {type(model).__name__} writes to a tf.Variable ({operation.name}) that is not Keras's.",
                why="replicas merge the variables of the model; others would differ between workers.",
                do="make it a weight of the model, self.add_weight(..., trainable=False), or a metric.",
            )


def _writes(graph: Any, outside: dict[int, Any]) -> Iterator[tuple[Any, Any]]:
    """Operations that write, in branches, loops and functions too, and what they write to, if it comes from outside."""
    for operation in graph.get_operations():
        if operation.type.startswith(_WRITES) and operation.inputs:
            yield operation, outside.get(id(operation.inputs[0]))
        attributes, skipped = _CALLS.get(operation.type.removeprefix("Stateless"), ((), 0))
        for attribute in attributes:
            function = graph._get_function(operation.get_attr(attribute).name)
            if function is not None:
                pairs = zip(function.graph.inputs, list(operation.inputs)[skipped:], strict=False)
                yield from _writes(function.graph, {id(inside): outside.get(id(given)) for inside, given in pairs})
