"""What functions of a tf.data dataset draw while several of their calls run at once.

Threads draw as they come, so that each run gives other numbers to a row, and each worker, too. TensorFlow has a remedy,
a rewriting of datasets that comes with tf.config.experimental.enable_op_determinism: what is drawn in parallel calls is
drawn in one call after the other, and the rest of these calls stays parallel. Here it is had for single datasets,
without what else that switch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset
from tensorflow.python.framework import op_def_registry

from duoka.frameworks.keras.restarting import list_operations

# Parts of names. Layers and generators have their state in a variable, which they assign to.
_DRAWING = ("Random", "Rng", "Stateful", "Sampl", "Multinomial", "TruncatedNormal", "Assign")
_NO_DRAWS = {"StatefulPartitionedCall", "StatelessRandomGetAlg"}  # a function that is called is looked at itself
_PARALLEL = ("Parallel", "MapAndBatch")  # parts of the names of stages


def draw_in_turn(data: Any, tell: Callable[[str], None]) -> Any:
    """The same data; if it is a dataset that draws in parallel calls, each run and each worker draws the same."""
    names = sorted(set(_parallel_draws(data))) if isinstance(data, tf.data.Dataset) else []
    if not names or isinstance(data, InTurn):
        return data
    tell(
        f"a dataset draws random numbers, or counts, in parallel calls ({', '.join(names)}), which differs from run to"
        " run: it is done in one call after the other, as without num_parallel_calls. Stateless operations"
        " (tf.image.stateless_*) stay parallel, and give the same numbers by themselves"
    )
    return InTurn(data)


class InTurn(UnaryUnchangedStructureDataset):
    def __init__(self, dataset: Any) -> None:
        variant = tf.raw_ops.OptimizeDatasetV2(
            input_dataset=dataset._variant_tensor,
            optimizations_enabled=["make_deterministic"],
            optimizations_disabled=[],
            optimizations_default=[],
            **dataset._flat_structure,
        )
        super().__init__(dataset, variant)


def _parallel_draws(dataset: Any) -> Iterator[str]:
    """The operations that draw, or write to variables, in the functions of parallel stages. They may be repeated."""
    is_parallel = _has_part(type(dataset).__name__, _PARALLEL)
    for wrapper in dataset._functions():
        names = set(list_operations(wrapper.function.graph.as_graph_def()))
        # The stages of datasets that a function makes are operations of it.
        if is_parallel or any(name.count("Dataset") and _has_part(name, _PARALLEL) for name in names):
            yield from (name for name in names if _draws(name))
    for below in dataset._inputs():
        yield from _parallel_draws(below)


def _draws(name: str) -> bool:
    definition = op_def_registry.get(name)
    return definition is not None and definition.is_stateful and name not in _NO_DRAWS and _has_part(name, _DRAWING)


def _has_part(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)
