"""Where TensorFlow has really put variables and operations. What `op.device` says is only the request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tensorflow.python.eager import context

from duoka.frameworks.placement_log import PlacementLog, Row, list_kinds

_PLUMBING = ("_Arg", "_Retval", "_Send", "_Recv", "_Host", "_Device", "_EagerConst", "Const", "NoOp")
_CONTROL = ("Enter", "Exit", "Merge", "Switch", "NextIteration", "LoopCond")
_CALLS = ("StatefulPartitionedCall", "PartitionedCall")


@contextmanager
def log_step_placement(log: PlacementLog | None, variables: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Put it around the first step that is executed, eager or a `tf.function`: the table is shown behind it.

    Later steps pass through. The variables are asked for when the step is over: it may have made them.
    """
    if log is None or not log.is_wanted:
        yield
        return
    with watching_operations() as rows:
        yield
    log.show([*(variable_row(variable) for variable in variables()), *rows])


@contextmanager
def watching_operations() -> Iterator[list[Row]]:
    """The list is filled at the end of the block."""
    rows: list[Row] = []
    runtime = context.context()
    runtime.ensure_initialized()
    runtime.clear_kernel_cache()  # graphs are written down when kernels are made: those of before would be missing
    runtime.enable_run_metadata()
    try:
        yield rows
        rows += _read(runtime.export_run_metadata())
    finally:
        runtime.disable_run_metadata()


def variable_row(variable: Any) -> Row:
    """Of a `tf.Variable` or a Keras one."""
    inner = getattr(variable, "value", None)
    name = getattr(variable, "path", variable.name)
    device = variable.device if inner is None or callable(inner) else inner.device
    return Row("variable", name, f"{getattr(variable.dtype, 'name', variable.dtype)} {tuple(variable.shape)}", device)


def _read(metadata: Any) -> list[Row]:
    groups: dict[tuple[str, str], list[str]] = {}
    for graph in metadata.partition_graphs:
        for node in graph.node:
            if not node.op.startswith(_PLUMBING) and node.op not in _CONTROL:
                kind = node.op.removeprefix("_Mkl")  # the same operation in oneDNN
                groups.setdefault((_scope_of(node.name, kind), node.device), []).append(kind)
    return [Row("operations", scope, list_kinds(kinds), device) for (scope, device), kinds in groups.items()]


def _scope_of(name: str, kind: str) -> str:
    """The scope of an operation: with Keras, its model and layer. A variable is read for an operation, in its name."""
    in_loop = name.startswith("while/body/")  # of `strategy.run`: while/body/_7/while/...
    parts = [part for part in name.split("/")[4 if in_loop else 0 :] if not part.startswith(_CALLS)]
    parts = parts[: -2 if kind == "ReadVariableOp" else -1]
    return "/".join(parts[: 3 if parts[:1] == ["gradient_tape"] else 2]) or "(no scope)"
