"""Finds out, at the first batch, what a step on PyTorch does behind Keras's back: writes in place, and late reads.

A step that is held back until its end must not look at the weights that it has applied gradients to: they are the old
ones still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from duoka.errors import MismatchError
from duoka.frameworks.keras.recorder import NeedsWholeShares, Recorder


@contextmanager
def watching_writes(model: Any, recorder: Recorder) -> Iterator[None]:
    """Those that went through Keras are known to the recorder."""
    variables, buffers = list(model.variables), dict(_buffers(model))
    before = [_write_marks(variable.value) for variable in variables]
    buffer_versions = {name: buffer._version for name, buffer in buffers.items()}
    operations = _Operations(model, recorder)
    with operations:
        yield
    if foreign := [name for name, buffer in buffers.items() if buffer._version != buffer_versions[name]]:
        raise MismatchError(
            f"The step changes {', '.join(foreign[:5])}, which belongs to a PyTorch module inside the model.",
            why="replicas merge the state of Keras layers; that of other modules would differ between workers.",
            do="use a Keras layer in its place (keras.layers.BatchNormalization), or one replica.",
        )
    if operations.late is not None:
        raise NeedsWholeShares(f"it uses {operations.late} after it has applied gradients")
    known = recorder.changed.keys() | recorder.counted
    for variable, marks in zip(variables, before, strict=True):
        is_written = id(variable) in operations.written or _write_marks(variable.value) != marks
        if is_written and id(variable) not in known:
            raise NeedsWholeShares(f"it writes to {variable.path} in place")


def _write_marks(tensor: torch.Tensor) -> tuple[int, int]:
    """PyTorch counts the writes to a tensor, except those to its `data`, which may also be replaced."""
    return tensor._version, tensor.data_ptr()


class _Operations(TorchDispatchMode):
    """Sees every operation on the memory of the model's variables, by whatever name the step has it.

    Not those inside of what torch.compile has made: a mode that wants them would keep PyTorch from compiling, for good.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, model: Any, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        metrics = {id(variable) for variable in model.metrics_variables}
        self._variables = {_memory_of(each.value): each for each in model.variables if id(each) not in metrics}
        self._variables.pop(0, None)
        self.written: set[int] = set()  # ids of variables
        self.late: str | None = None  # the variable that was used first after gradients were applied

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if hasattr(function, "_schema"):  # operators that take functions have none
            self._see(function._schema.arguments, args, kwargs)
        return function(*args, **kwargs)

    def _see(self, arguments: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        for argument in arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(given.get(argument.name)):
                variable = self._variables.get(_memory_of(tensor)) if isinstance(tensor, torch.Tensor) else None
                if variable is None:
                    continue
                if is_written:
                    self.written.add(id(variable))
                if self._recorder.gradients is not None:
                    self.late = self.late or variable.path


def _memory_of(tensor: torch.Tensor) -> int:
    """0 where there is none, or more than one: of sparse tensors, and of classes that wrap others."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
    except (RuntimeError, NotImplementedError):
        return 0


def _buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for layer in model._flatten_layers():
        module = layer.__dict__.get("_modules", {}).get("module", layer.__dict__.get("module"))
        if isinstance(module, torch.nn.Module):
            for name, buffer in module.named_buffers():
                yield f"{layer.name}.{name}", buffer
