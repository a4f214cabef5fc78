"""Datasets of tf.data that begin anew each time they are read, whatever was read of them before.

One worker can read such a dataset for all without being asked for: the others have an iterator each that they leave
unread and drop at the end of the epoch, and the next one starts where the reader's next one does. Seeds of shuffles are
drawn when an iterator is made. Whatever is not known to be of this kind is not: this file may only err to that side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from duoka.devices.cores import count_all_cores

_SOURCES = {"_TensorDataset", "_TensorSliceDataset", "_RangeDataset", "TFRecordDatasetV2", "TextLineDatasetV2"}
_STAGES = {
    *("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_UnbatchDataset", "_ZipDataset"),
    *("_MapDataset", "_ParallelMapDataset", "_FilterDataset", "_TakeDataset", "_SkipDataset", "_ShuffleDataset"),
    *("_FlatMapDataset", "_InterleaveDataset", "_RepeatDataset", "_ConcatenateDataset", "_PrefetchDataset"),
    "_OptionsDataset",
}  # not _ParallelInterleaveDataset, which does not tell whether it keeps an order
# These make iterators of what is below them while they are read, and a shuffle there draws a seed for each.
_LATE = {"_RepeatDataset", "_ConcatenateDataset"}
# TensorFlow takes these for stateful. The first call functions, which are looked at themselves; datasets are made anew.
_HARMLESS = {
    *("StatefulPartitionedCall", "If", "While", "Case", "Assert"),
    *("TensorSliceDataset", "RangeDataset", "TFRecordDataset", "TFRecordDatasetV2", "TextLineDataset"),
}
_OUTSIDE = {"PyFuncStateless"}  # Python, called stateless by whoever wrote it


def restarts(dataset: Any) -> bool:
    """Whether reading it leaves no trace: no Python, no variables, no random numbers but those of shuffles."""
    return (
        isinstance(dataset, tf.data.Dataset)
        and dataset.options().deterministic is not False
        and _restarts(dataset, is_made_late=False)
    )


def with_own_threads(dataset: Any) -> Any:
    """The same batches, made by threads of their own: those that compute are few, and kept to a worker's cores."""
    if dataset.options().threading.private_threadpool_size:
        return dataset
    options = tf.data.Options()
    options.threading.private_threadpool_size = count_all_cores()
    return dataset.with_options(options)


def _restarts(dataset: Any, *, is_made_late: bool) -> bool:
    kind = type(dataset).__name__
    if kind not in _SOURCES | _STAGES or not type(dataset).__module__.startswith("tensorflow."):
        return False
    if getattr(dataset, "_deterministic", None) == "false":
        return False
    if kind == "_ShuffleDataset" and is_made_late:
        return False
    late = is_made_late or kind in _LATE
    return all(map(_is_pure, dataset._functions())) and all(
        _restarts(below, is_made_late=late) for below in dataset._inputs()
    )


def _is_pure(wrapper: Any) -> bool:
    """A function of its arguments alone. A variable or a table that it holds comes in as a resource."""
    function = wrapper.function
    if any(captured.dtype in (tf.resource, tf.variant) for captured in function.captured_inputs):
        return False
    return all(_keeps_nothing(name) for name in list_operations(function.graph.as_graph_def()))


def list_operations(graph: Any) -> Iterator[str]:
    names = {function.signature.name for function in graph.library.function}
    for node in (*graph.node, *(node for function in graph.library.function for node in function.node_def)):
        if node.op not in names:
            yield node.op


def _keeps_nothing(name: str) -> bool:
    definition = op_def_registry.get(name)
    if definition is None or name in _OUTSIDE:
        return False
    return not definition.is_stateful or name in _HARMLESS
