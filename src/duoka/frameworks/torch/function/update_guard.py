"""Finds zero_grad, backward and step inside of a function, while it runs on trial. Parameters stay as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from duoka.errors import MismatchError
from duoka.frameworks.torch.function.in_place import read_parameter_marks, refuse_changed_parameters, version_of
from duoka.frameworks.torch.function.trained import Trained
from duoka.frameworks.torch.tensors import as_bytes


class UpdateGuard:
    """In its `with` block some gradients are zeros, which zero_grad would remove, and no prepared optimizer steps."""

    def __init__(self, trained: Trained, title: str) -> None:
        self._parameters, self._names, self._title = trained.everything, trained.all_names, title
        self._marked: Sequence[nn.Parameter] = trained.first_parameters()
        self._has_stepped = False

    def __enter__(self) -> UpdateGuard:
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._values = [parameter.detach().clone() for parameter in self._parameters]
        for parameter in self._marked:
            parameter.grad = torch.zeros_like(parameter)
        self._expected = [parameter.grad for parameter in self._parameters]
        self._gradient_versions = self._read_gradient_versions()
        self._marks = read_parameter_marks(self._parameters)
        self._hook = register_optimizer_step_pre_hook(self._refuse_step)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        for parameter, value in zip(self._parameters, self._values, strict=True):
            if not torch.equal(as_bytes(parameter), as_bytes(value)):  # not by versions: .data leaves them alone
                parameter.data.copy_(value)

    def look(self) -> None:
        """Raise if the function has updated something since the block began."""
        are_same = all(p.grad is grad for p, grad in zip(self._parameters, self._expected, strict=True))
        if self._has_stepped or not are_same or self._read_gradient_versions() != self._gradient_versions:
            raise self._refusal()
        refuse_changed_parameters(self._parameters, self._names, self._marks, self._title)

    def _read_gradient_versions(self) -> list[int]:
        return [0 if gradient is None else version_of(gradient) for gradient in self._expected]

    def _refuse_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        own = {id(parameter) for parameter in self._parameters}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self._has_stepped = True
            raise self._refusal()

    def _refusal(self) -> MismatchError:
        return MismatchError(
            f"{self._title} calls zero_grad, backward or step inside of the function.",
            why="it runs once for each replica, before their gradients are added up.",
            do="they belong after strategy.backward, which calls backward itself. For a gradient that is a part of the"
            " loss use torch.autograd.grad.",
        )
