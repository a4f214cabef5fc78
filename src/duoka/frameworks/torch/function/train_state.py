"""The state of a run in function style at a step boundary: taken as it is, without copies, and put in place."""

from __future__ import annotations

import copy
from typing import Any

import torch

from duoka.errors import CheckpointError
from duoka.frameworks.torch.function.call import Calls
from duoka.frameworks.torch.function.loaders import Loaders
from duoka.frameworks.torch.function.trained import Trained
from duoka.frameworks.torch.generators import capture_generators, restore_generators
from duoka.frameworks.torch.prepared import OBJECTS, Prepared, load
from duoka.strategies.registered_state import RegisteredState
from duoka.strategies.training_loop import BETWEEN, TrainingLoop


class TrainState:
    """Takes the state of a run, and puts it in place."""

    def __init__(
        self, prepared: Prepared, trained: Trained, calls: Calls, loaders: Loaders, loop: TrainingLoop
    ) -> None:
        self._prepared, self._trained, self._calls = prepared, trained, calls
        self._loaders, self._loop = loaders, loop
        self._at_epoch: dict[str, Any] = {}  # the global generators when the epoch under way began

    def begin_epoch(self) -> None:
        self._at_epoch = capture_generators()

    def capture(self, registered: RegisteredState) -> dict[str, Any]:
        prepared = self._prepared
        tensors = self._name_tensors()
        state: dict[str, Any] = {kind: [thing.state_dict() for thing in getattr(prepared, kind)] for kind in OBJECTS}
        return state | {
            "hyperparameters": prepared.hyperparameters,
            "tensors": tensors,
            "gradients": {
                name: tensor.grad.to_dense()
                for name, tensor in tensors.items()
                if tensor.is_leaf and tensor.grad is not None
            },
            "frozen": [name for name, tensor in tensors.items() if not tensor.requires_grad],
            "evaluating": [name for name, module in prepared.named_modules() if not module.training],
            "extra": prepared.extra_states(),
            "calls": self._calls.capture(),
            "moving": self._trained.list_moving(prepared.named_modules()),
            "loaders": self._loaders.capture(),
            "position": self._loop.capture(),
            "registered": registered.capture(),
            "generators": capture_generators(),
            "generators_at_epoch": self._at_epoch,
        }

    def check(self, state: dict[str, Any]) -> list[str]:
        """Raise where the state does not fit to this script. Returns the values that the script gives otherwise."""
        self._prepared.check(self._name_tensors(), state["tensors"], state)
        self._calls.check(state["calls"])
        return self._prepared.list_changes(state["hyperparameters"])

    def put(self, state: dict[str, Any], registered: RegisteredState, *, is_again: bool) -> None:
        """Put it in place, completely. `is_again`: a second time, where the interrupted loop continues."""
        prepared = self._prepared
        named = self._name_tensors()
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(state["tensors"][name])
        frozen = set(state["frozen"])
        for name, tensor in named.items():
            if not isinstance(tensor, torch.nn.Parameter):
                continue
            tensor.requires_grad_(name not in frozen)
            saved = state["gradients"].get(name)
            tensor.grad = None if saved is None else saved.to(tensor.device, copy=True)
        modules = dict(prepared.named_modules())
        for name, module in modules.items():
            module.training = name not in state["evaluating"]
            if name in state["extra"]:
                module.set_extra_state(copy.deepcopy(state["extra"][name]))
        for kind in OBJECTS:
            for thing, saved in zip(getattr(prepared, kind), state[kind], strict=True):
                load(thing, copy.deepcopy(saved))  # it may keep what it is passed, and this may be needed once more
        self._calls.restore(state["calls"])
        self._trained.set_moving(modules, state["moving"])
        self._loaders.restore(state["loaders"], is_again=is_again)
        registered.restore(state["registered"])
        # Between the begin of an interrupted epoch and its loop, the script draws the same numbers again.
        is_on_the_way = not is_again and state["position"]["place"] != BETWEEN
        restore_generators(state["generators_at_epoch" if is_on_the_way else "generators"])
        self._at_epoch = state["generators_at_epoch"]
        prepared.hyperparameters = state["hyperparameters"]

    def _name_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of models, and parameters that only an optimizer holds."""
        named = dict(self._prepared.named_tensors())
        known = {id(tensor) for tensor in named.values()}
        for number, optimizer in enumerate(self._prepared.optimizers, 1):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for position, parameter in enumerate(parameters):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    named[f"parameter {position} of optimizer {number}"] = parameter
        return named


def refuse_other_framework(state: dict[str, Any]) -> None:
    if state.get("framework") != "torch":
        raise CheckpointError(
            f"The saved state is one of {state.get('framework')}, and this run trains with PyTorch.",
            do="use another directory.",
        )
