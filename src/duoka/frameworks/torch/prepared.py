"""What a script has prepared, and how its saved state is compared with it and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from duoka.errors import CheckpointError
from duoka.frameworks.torch.hyperparameters import Hyperparameters, describe, list_changes

OBJECTS = ("optimizers", "schedulers", "scalers")  # what has a state_dict of its own


@dataclass
class Prepared:
    """What a script has prepared, each kind in the order of preparing."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    hyperparameters: dict[str, list[Hyperparameters]] = field(default_factory=lambda: {kind: [] for kind in OBJECTS})

    def add(self, kind: str, thing: Any) -> None:
        """An optimizer, a scheduler or a scaler, as the script has made it."""
        getattr(self, kind).append(thing)
        self.hyperparameters[kind].append(describe(thing))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers of all models, each once, also those that a state_dict leaves out."""
        seen: set[int] = set()
        for number, model in enumerate(self.models):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _name(number, name), tensor

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: tensor for name, tensor in self.named_tensors() if isinstance(tensor, nn.Parameter)}

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for number, model in enumerate(self.models):
            for name, module in model.named_modules():
                yield _name(number, name), module

    def extra_states(self) -> dict[str, Any]:
        """What modules keep besides, in the words of PyTorch."""
        return {name: module.get_extra_state() for name, module in self.named_modules() if _has_extra_state(module)}

    # Saved state.

    def check(self, here: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], saved: dict[str, Any]) -> None:
        """Raise where saved tensors and objects do not fit to what is prepared here. Nothing is changed."""
        _compare_tensors(here, tensors)
        for kind in OBJECTS:
            have, had = len(getattr(self, kind)), len(saved[kind])
            if have != had:
                raise _other_run(
                    f"it has {had} {kind}, and {have} {'is' if have == 1 else 'are'} prepared here",
                    "prepare the same objects before restoring, or begin a new run in another directory.",
                )
            for number, pair in enumerate(
                zip(self.hyperparameters[kind], saved["hyperparameters"][kind], strict=True), 1
            ):
                _compare_classes(f"{kind.removesuffix('s')} {number}", *(each["class"] for each in pair))
        for number, (optimizer, had) in enumerate(zip(self.optimizers, saved["optimizers"], strict=True), 1):
            _compare_groups(number, optimizer, had)

    def list_changes(self, saved: dict[str, list[Hyperparameters]]) -> list[str]:
        """The values that this script gives to its optimizers, schedulers and scalers, and the saved run did not."""
        kinds = [(kind.removesuffix("s"), self.hyperparameters[kind], saved[kind]) for kind in OBJECTS]
        return [line for kind, here, there in kinds for line in list_changes(kind, here, there)]


def _name(number: int, name: str) -> str:
    """`0.weight`, or `model 2: 0.weight`."""
    return name if number == 0 else f"model {number + 1}: {name}"


def _compare_classes(title: str, here: str, saved: str) -> None:
    if here != saved:
        raise CheckpointError(
            f"The saved state is of another {title.split()[0]}.",
            why=f"{title} is {here} here, and {saved} in the saved run.",
            do=f"use {saved}, or begin a new run in another directory.",
        )


def _compare_tensors(here: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Name the first difference."""
    for name, tensor in here.items():
        if name not in saved:
            raise _other_run(f"{name} {_form(tensor)} is in this model, and not in the saved one")
        if _form(tensor) != _form(saved[name]):
            raise _other_run(f"{name} is {_form(tensor)} here, and {_form(saved[name])} in the saved one")
    for name, tensor in saved.items():
        if name not in here:
            raise _other_run(f"{name} {_form(tensor)} is in the saved model, and not in this one")


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _compare_groups(number: int, optimizer: Any, saved: dict[str, Any]) -> None:
    have = [len(group["params"]) for group in optimizer.param_groups]
    had = [len(group["params"]) for group in saved["param_groups"]]
    if have != had:
        raise CheckpointError(
            "The saved state is of another optimizer.",
            why=f"optimizer {number} has groups of {have} parameters here, and of {had} in the saved run.",
            do="give it the same groups before the loop; one that the script adds later (add_param_group) is to be"
            " there from the start, with lr=0 or requires_grad_(False) until it trains; or begin a new run in another"
            " directory.",
        )


def _other_run(why: str, do: str = "use the model of that run, or begin a new run in another directory.") -> Any:
    return CheckpointError("The saved state is of another model.", why=f"{why}.", do=do)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def load(thing: Any, saved: dict[str, Any]) -> None:
    try:
        if isinstance(thing, torch.optim.Optimizer):
            with _keeping_groups(thing):
                thing.load_state_dict(saved)
                _keep_types(thing, saved)
        else:
            thing.load_state_dict(saved)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"The saved state of a {type(thing).__name__} does not fit.", why=f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def _keeping_groups(optimizer: Any) -> Iterator[None]:
    """An optimizer that loads a state makes new groups. A script that has got hold of the old ones still sets rates."""
    groups, moments = optimizer.param_groups, optimizer.state
    yield
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    loaded_moments = dict(optimizer.state)
    moments.clear()
    moments.update(loaded_moments)
    optimizer.param_groups, optimizer.state = groups, moments


def _keep_types(optimizer: Any, saved: dict[str, Any]) -> None:
    """An optimizer turns what it loads into its parameters' type; a state in another one would lose digits."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, values in saved["state"].items():
        loaded = optimizer.state[parameters[position]]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and loaded[name].dtype != value.dtype:
                loaded[name] = value.to(loaded[name].device)
