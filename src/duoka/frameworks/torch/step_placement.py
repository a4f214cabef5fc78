"""Where PyTorch's parameters lie, and where its modules and operations gave their results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from duoka.frameworks.placement_log import PlacementLog, Row


class ModuleWatch:
    """Looks at the modules' results until the first update of weights, then shows the table and is gone."""

    def __init__(self, log: PlacementLog) -> None:
        self._log = log
        self._models: list[nn.Module] = []
        self._rows: dict[tuple[str, str], Row] = {}
        self._hooks: list[Any] = [register_optimizer_step_post_hook(self._finish)] if log.is_wanted else []

    def add(self, model: nn.Module) -> None:
        if not self._hooks:  # another worker's, or over
            return
        self._models.append(model)
        title = type(model).__name__
        if _is_compiled(model):
            self._rows[title, ""] = Row("program", title, "compiled: not looked into", _devices_of(model))
            return
        for name, module in model.named_modules():
            if name == "" or not any(True for _ in module.children()):
                self._hooks.append(module.register_forward_hook(self._make_hook(_join(title, name))))

    def _make_hook(self, name: str) -> Any:
        def see(module: nn.Module, given: Any, result: Any) -> None:
            if torch.compiler.is_compiling():
                return  # the same program is to come out of it as without hooks
            for device in {str(leaf.device) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}:
                self._rows.setdefault((name, device), Row("operations", name, type(module).__name__, device))

        return see

    def _finish(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        tensors = [
            _tensor_row(what, _join(type(model).__name__, name), tensor)
            for model in self._models
            for what, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
            for name, tensor in named
        ]
        self._log.show([*tensors, *self._rows.values()])


@contextmanager
def watching_operations() -> Iterator[list[Row]]:
    """Each kind of operation that runs in this block, forward or backward. The list is filled at its end."""
    rows: list[Row] = []
    with _Operations() as seen:
        yield rows
    rows += [Row("operations", name, f"{count} times", device) for (name, device), count in seen.counts.items()]


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[tuple[str, str], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for device in {str(leaf.device) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}:
            key = str(func.overloadpacket), device
            self.counts[key] = self.counts.get(key, 0) + 1
        return result


def variable_row(variable: Any) -> Row:
    """Of a Keras variable."""
    return _tensor_row("variable", variable.path, variable.value)


def _tensor_row(what: str, name: str, tensor: torch.Tensor) -> Row:
    return Row(what, name, f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}", str(tensor.device))


def _is_compiled(model: nn.Module) -> bool:
    """Then hooks inside would change what is compiled."""
    if isinstance(model, torch.jit.ScriptModule) or type(model).__name__ == "OptimizedModule":
        return True
    return any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())


def _devices_of(model: nn.Module) -> str:
    return ", ".join(sorted({str(tensor.device) for tensor in model.parameters()}))


def _join(title: str, name: str) -> str:
    return f"{title}.{name}" if name else title
