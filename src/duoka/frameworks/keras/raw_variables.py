"""What a step on TensorFlow does to tf.Variables themselves, behind Keras's back.

One that is not Keras's is refused: replicas do not know it. One below a variable of Keras may be used, but not by a
step that is held back until its end: what such a step finds after it has applied gradients are the old weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from duoka.errors import MismatchError
from duoka.frameworks.keras.recorder import NeedsWholeShares, Recorder
from duoka.frameworks.tensorflow.graphs import is_read, is_write, walk


@dataclass(frozen=True)
class _Use:
    type: str
    name: str
    handle: Any  # of a variable
    is_late: bool  # after gradients were applied


@contextmanager
def watching_raw_variables(model: Any, recorder: Recorder, merged: Iterable[Any]) -> Iterator[None]:
    """Around one tracing of a step, or one run that is not traced. `merged` is what replicas merge, and seeds."""
    graph = tf.compat.v1.get_default_graph()
    is_traced = hasattr(graph, "captures")
    if is_traced:
        start = count_operations()
        yield
        uses = list(_uses_in(graph, start, recorder.applied_at))
        _refuse_foreign(model, uses, [*model.variables, *merged, *recorder.changed.values()])
    else:
        with _watching_runs(recorder) as uses:
            yield
    _check(uses, model, recorder)


def count_operations() -> int:
    """Of the graph that is being traced: a place in it."""
    return len(tf.compat.v1.get_default_graph().get_operations())


def finding_places() -> Callable[[], int]:
    """Counts the operations of the graph that is being traced, for as long as that is where a step is.

    A branch runs for some batches only, and nothing comes out of it or out of a function but what that returns:
    gradients that are applied there cannot be held back.
    """
    outermost = tf.compat.v1.get_default_graph()

    def find_place() -> int:
        if tf.compat.v1.get_default_graph() is not outermost:
            raise NeedsWholeShares("it applies gradients inside a branch or a tf.function")
        return count_operations()

    return find_place


def traced_anew(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that is a tf.function itself keeps its trace, and with it what was watched or exchanged at that time."""
    inside = getattr(step, "python_function", None)
    return step if inside is None else tf.function(inside)


@contextmanager
def _watching_runs(recorder: Recorder) -> Iterator[list[_Use]]:
    """What is run at once, outside of any graph."""
    uses: list[_Use] = []

    def see(kind: str, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> None:
        if graph is None and inputs and inputs[0].dtype == tf.resource:
            uses.append(_Use(kind, kind, inputs[0], recorder.gradients is not None))

    op_callbacks.add_op_callback(see)
    try:
        yield uses
    finally:
        op_callbacks.remove_op_callback(see)


def _uses_in(graph: Any, start: int, applied_at: int | None) -> Iterator[_Use]:
    for since, until, is_late in ((start, applied_at, False), (applied_at, None, True)):
        for operation, outside in walk(graph, since=since, until=until) if since is not None else ():
            if outside and outside[0] is not None and outside[0].dtype == tf.resource:
                yield _Use(operation.type, operation.name, outside[0], is_late)


def _refuse_foreign(model: Any, uses: Iterable[_Use], known: Iterable[Any]) -> None:
    """Every replica of a worker would write to the same one, and the workers to different ones."""
    handles = {id(variable.value.handle) for variable in known}
    for use in uses:
        if is_write(use) and id(use.handle) not in handles:
            raise MismatchError(
                f"The step of {type(model).__name__} writes to a tf.Variable ({use.name}) that is not Keras's.",
                why="replicas merge the variables of the model; others would differ between workers.",
                do="make it a weight of the model, self.add_weight(..., trainable=False), or a metric.",
            )


def _check(uses: Iterable[_Use], model: Any, recorder: Recorder) -> None:
    metrics = {id(variable) for variable in model.metrics_variables}
    variables = {id(each.value.handle): each for each in model.variables if id(each) not in metrics}
    for use in uses:
        variable = variables.get(id(use.handle))
        if variable is None or not (is_write(use) or is_read(use)):
            continue
        if use.is_late:
            raise NeedsWholeShares(f"it uses {variable.path} after it has applied gradients")
        if is_write(use) and id(variable) not in recorder.changed:
            raise NeedsWholeShares(f"it writes to the tf.Variable of {variable.path}")
