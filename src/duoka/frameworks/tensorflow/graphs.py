"""What the operations of a graph do, in its branches, loops and functions too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

_DRAWS = ("RngReadAndSkip", "RngSkip", "StatefulStandardNormalV2", "StatefulUniform", "StatefulTruncatedNormal")
_WRITES = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign", "ResourceApply", "ResourceSparseApply", *_DRAWS)
_STATEFUL_RANDOM = {
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "RandomShuffle",
    "Multinomial",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
}
_STATELESS_RANDOM = ("StatelessRandom", "StatelessTruncated", "StatelessParameterized", "StatelessMultinomial")
# Operations that run other graphs: where those are named, and how many inputs come before theirs.
_CALLS = {
    "PartitionedCall": (("f",), 0),
    "StatefulPartitionedCall": (("f",), 0),
    "If": (("then_branch", "else_branch"), 1),
    "Case": (("branches",), 1),
    "While": (("cond", "body"), 0),
}


def graph_here() -> Any:
    """That is being built; None outside of graphs."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def is_in_function_of(outer: Any) -> bool:
    """Whether a function is traced that a graph, or code outside of graphs, calls; a branch or a loop is none."""
    graph = graph_here()
    while graph is not outer and isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph is not outer


def walk(
    graph: Any, outside: dict[int, Any] | None = None, since: int = 0, until: int | None = None
) -> Iterator[tuple[Any, list[Any]]]:
    """Operations in the order of the text, and what each of their inputs is outside of the graph, or None.

    `since` and `until` are places in the outermost graph.
    """
    if outside is None:
        outside = {id(internal): external for external, internal in graph.captures}
    for operation in graph.get_operations()[since:until]:
        inputs = [outside.get(id(given)) for given in operation.inputs]
        yield operation, inputs
        attributes, skipped = _CALLS.get(operation.type.removeprefix("Stateless"), ((), 0))
        for attribute in attributes:
            named = operation.get_attr(attribute)
            for name in named if isinstance(named, list) else [named]:
                inner = getattr(graph._get_function(name.name), "graph", None)  # none in TensorFlow's own (ctc_loss)
                if inner is not None:
                    pairs = zip(inner.inputs, inputs[skipped:], strict=False)
                    yield from walk(inner, {id(inside): given for inside, given in pairs})


def is_read(operation: Any) -> bool:
    """Of a variable's value, not of its shape."""
    return operation.type in ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


def is_write(operation: Any) -> bool:
    return bool(operation.type.startswith(_WRITES))


def is_stateful_random(operation: Any) -> bool:
    """Its numbers come from a counter of the process: they cannot be drawn again for a step and a replica."""
    return operation.type in _STATEFUL_RANDOM


def is_random(operation: Any) -> bool:
    """Of any kind, with or without a state."""
    return is_stateful_random(operation) or operation.type.startswith((*_DRAWS, *_STATELESS_RANDOM))


def variables_of(graph: Any) -> list[Any]:
    """In the order of the text; TensorFlow itself has them in any order."""
    by_handle = {id(variable.handle): variable for variable in graph.variables}
    return [by_handle[id(external)] for external, _ in graph.captures if id(external) in by_handle]


def written_by(graph: Any, since: int = 0, until: int | None = None) -> list[Any]:
    """The variables that are written to, in the order of the text."""
    return _first_inputs(graph, is_write, since, until)


def drawn_from(graph: Any) -> list[Any]:
    """Those of them that are the states of a tf.random.Generator."""
    return _first_inputs(graph, lambda operation: operation.type.startswith(_DRAWS))


def summing_up(graph: Any) -> list[Any]:
    """Those of them that something is added to which is no constant: maybe rows, or losses, are counted."""
    return _first_inputs(graph, _adds_more_than_a_constant)


def _first_inputs(graph: Any, is_wanted: Callable[[Any], bool], since: int = 0, until: int | None = None) -> list[Any]:
    """The variables that some operations have to do with, in the order of the text."""
    by_handle = {id(variable.handle): variable for variable in graph.variables}
    found: dict[int, Any] = {}
    for operation, outside in walk(graph, since=since, until=until):
        if outside and outside[0] is not None and id(outside[0]) in by_handle and is_wanted(operation):
            variable = by_handle[id(outside[0])]
            found[id(variable)] = variable
    return list(found.values())


def only_added_to(graph: Any) -> list[Any]:
    """Those of them that nothing happens to but that something is added: `v.assign_add(x)`, or `v.assign(v + x)`."""
    by_handle = {id(variable.handle): variable for variable in graph.variables}
    found: dict[int, Any] = {}
    others: set[int] = set()
    for operation, outside in walk(graph):
        if is_write(operation) and outside and outside[0] is not None:
            key = id(outside[0])
            if key in by_handle and _is_addition(operation):
                found[key] = by_handle[key]
            else:
                others.add(key)
    return [variable for key, variable in found.items() if key not in others]


def _adds_more_than_a_constant(write: Any) -> bool:
    if write.type == "AssignAddVariableOp":
        return bool(_behind_casts(write.inputs[1].op).type != "Const")
    if write.type != "AssignVariableOp" or not _is_addition(write):
        return False
    value = _behind_casts(write.inputs[1].op)
    return value.type != "Sub" and all(_behind_casts(term.op).type != "Const" for term in value.inputs)


def _is_addition(write: Any) -> bool:
    if write.type in ("AssignAddVariableOp", "AssignSubVariableOp"):
        return True
    if write.type != "AssignVariableOp":
        return False
    value = _behind_casts(write.inputs[1].op)
    terms = [_behind_casts(term.op) for term in value.inputs]
    return value.type in ("Add", "AddV2", "Sub") and any(
        term.type == "ReadVariableOp" and term.inputs[0] is write.inputs[0] for term in terms
    )


def _behind_casts(operation: Any) -> Any:
    while operation.type in ("Identity", "Cast"):
        operation = operation.inputs[0].op
    return operation
