"""The whole state of a PyTorch run at a border between steps, and back. Tensors are given as they are, not copied."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from duoka.data.position import Epochs, Saves, stretch_after, stretch_in
from duoka.data.trail import EPOCH, Trail
from duoka.errors import CheckpointError
from duoka.frameworks import generators
from duoka.frameworks.torch.course import refusal
from duoka.frameworks.torch.evaluation import Evaluation
from duoka.frameworks.torch.generators import capture_generators, restore_generators
from duoka.frameworks.torch.given import Given, describe, list_changes
from duoka.frameworks.torch.gradients import Gradients
from duoka.frameworks.torch.loader import PreparedLoader
from duoka.frameworks.torch.loop import Loop
from duoka.strategies.also import Also

FRAMEWORK = "torch"
_OBJECTS = ("optimizers", "schedulers", "scalers")  # what has a state_dict of its own


@dataclass
class Parts:
    """What a script has prepared, each kind in the order of preparing."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    given: dict[str, list[Given]] = field(default_factory=lambda: {kind: [] for kind in _OBJECTS})

    def add(self, kind: str, thing: Any) -> None:
        """An optimizer, a scheduler or a scaler, as the script has made it."""
        getattr(self, kind).append(thing)
        self.given[kind].append(describe(thing))

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


def _name(number: int, name: str) -> str:
    """`0.weight`, or `model 2: 0.weight`."""
    return name if number == 0 else f"model {number + 1}: {name}"


class Capture:
    """Takes a run's state apart, and puts it together again."""

    def __init__(
        self,
        parts: Parts,
        loop: Loop,
        gradients: Gradients,
        evaluation: Evaluation,
        epochs: Epochs,
        refresh: Callable[[], None],
        tell: Callable[[str], None],
        trail: Trail,
        also: Also,
    ) -> None:
        self._parts = parts
        self._loop = loop
        self._gradients = gradients
        self._evaluation = evaluation
        self._epochs = epochs
        self._refresh = refresh  # buffers have got other values
        self._tell = tell
        self._trail = trail
        self._also = also
        self.saves = Saves(tell)
        self._stretch = 0  # of the script: see Passes
        self._numbers: list[int] = []  # of the loaders that are prepared
        self._num_added = 0  # loaders that the script has prepared, those of epochs that are left out included
        self._at_epoch = 0  # the same, when the epoch under way began, or the last loop over epochs ended
        self._is_at_end_of_epochs = False  # the state that was restored, if its last loop over epochs was over
        self._positions: dict[int, dict[str, Any]] = {}  # of loaders that are still to be prepared
        self._at_loop: dict[str, Any] | None = None  # generators, when the loop over epochs began
        self._at_epoch_start: dict[str, Any] | None = None  # the same, when its epoch under way did

    def capture(self) -> dict[str, Any]:
        parts, loop = self._parts, self._loop
        if loop.body is not None:
            raise refusal("a loop was left while its iterator is kept, so that its last batch is still under way")
        self._name_strangers()
        positions = self._capture_positions()
        state: dict[str, Any] = {name: [thing.state_dict() for thing in getattr(parts, name)] for name in _OBJECTS}
        return state | {
            "framework": FRAMEWORK,
            "given": parts.given,
            "tensors": dict(parts.named_tensors()),
            "frozen": [name for name, p in parts.named_parameters().items() if not p.requires_grad],
            "evaluating": [name for name, module in parts.named_modules() if not module.training],
            "extra": {name: module.get_extra_state() for name, module in parts.named_modules() if _has_extra(module)},
            "gradients": self._capture_gradients(),
            "accumulation": self._gradients.accumulation.capture(parts.named_parameters()),
            "moving": self._capture_moving(),
            "step": loop.step,
            "batch": loop.batch,
            "whole_shares": loop.runs_whole_shares,
            "last_calls": list(self._gradients.last_calls),
            "epoch": self._epochs.epoch or max((loader.passes.position[0] for loader in parts.loaders), default=0),
            "epochs": self._epochs.capture(),
            "loaders": {"numbers": sorted(positions), "at_epoch": self._at_epoch},
            "position": [positions[number] for number in sorted(positions)],
            "evaluations": self._evaluation.capture(),
            "recollections": self._evaluation.recollections.capture(),
            "trail": self._trail.capture(),
            "generators": capture_generators(),
            "save": self.saves.last,
        }

    def _capture_positions(self) -> dict[int, dict[str, Any]]:
        """By the numbers of loaders."""
        here = zip(self._numbers, self._parts.loaders, strict=True)
        return {number: loader.passes.capture() for number, loader in here} | self._positions

    def _capture_gradients(self) -> dict[str, torch.Tensor]:
        """What is in `p.grad` and may be added to: not what the next body will certainly throw away."""
        if self._gradients.accumulation.batches_before:
            return {}
        done = {id(p) for p in self._parts.named_parameters().values()} if self._loop.batch == 0 else set()
        for optimizer in self._parts.optimizers:
            if self._loop.updated.get(id(optimizer)) == self._loop.batch - 1:
                done |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        done -= self._gradients.list_added_to()
        named = self._parts.named_parameters().items()
        return {name: p.grad.to_dense() for name, p in named if p.grad is not None and id(p) not in done}

    def _capture_moving(self) -> list[list[str]]:
        moving = self._gradients.moving
        return [
            [path, name]
            for path, module in self._parts.named_modules()
            for name in module._buffers
            if (id(module), name) in moving
        ]

    def restore(self, state: dict[str, Any]) -> None:
        """All of it is checked before anything is changed."""
        self._check(state)
        self._name_strangers()
        self._name_changes(state["given"])
        is_here = self._restore_position(state)
        self._evaluation.recollections.restore(state["recollections"])
        self._trail.restore(state["trail"])
        # Whoever is given its state may go on with the very objects, and they are needed once more.
        self._put(state if is_here else state | {kind: copy.deepcopy(state[kind]) for kind in (*_OBJECTS, "extra")})
        if is_here:
            self._arrive(state)
        else:
            self._also.begin_at_top()
            self._loop.replay_until(lambda: self._put_again(state))

    def _put_again(self, state: dict[str, Any]) -> None:
        """The script is where the state was taken, and may have changed something on its way."""
        self._check(state)
        _compare_accumulations(self._gradients.accumulation.num_batches, state["accumulation"])
        self._put(state)
        self._arrive(state)

    def _arrive(self, state: dict[str, Any]) -> None:
        self._also.arrive()
        for name, module in self._parts.named_modules():
            module.training = name not in state["evaluating"]
        self._evaluation.restore(state["evaluations"])
        self._evaluation.recollections.arrive(state["recollections"])
        self._trail.arrive(state["trail"])
        self._loop.step, self._loop.batch = state["step"], state["batch"]
        restore_generators(state["generators"])

    def _put(self, state: dict[str, Any]) -> None:
        parts, loop = self._parts, self._loop
        with torch.no_grad():
            for name, tensor in parts.named_tensors():
                tensor.copy_(state["tensors"][name])
        for name, parameter in parts.named_parameters().items():
            parameter.requires_grad_(name not in state["frozen"])
            saved = state["gradients"].get(name)
            parameter.grad = None if saved is None else saved.to(parameter.device, copy=True)
        for name, module in parts.named_modules():
            if name in state["extra"]:
                module.set_extra_state(state["extra"][name])
        for kind in _OBJECTS:
            for thing, saved in zip(getattr(parts, kind), state[kind], strict=True):
                _load(thing, saved)
        self._gradients.accumulation.restore(state["accumulation"], parts.named_parameters())
        modules = dict(parts.named_modules())
        self._gradients.moving |= {(id(modules[path]), name) for path, name in state["moving"]}
        self._gradients.last_calls = list(state["last_calls"])
        loop.runs_whole_shares = state["whole_shares"]
        loop.updated = {}
        self._refresh()

    def _restore_position(self, state: dict[str, Any]) -> bool:
        """Lead the script there. Says whether it is there: at this place, or nothing has happened before it."""
        here = {n: each.passes.where for n, each in zip(self._numbers, self._parts.loaders, strict=True)}
        self._epochs.resume(state["epochs"])
        positions = dict(zip(state["loaders"]["numbers"], state["position"], strict=True))
        for number, loader in zip(self._numbers, self._parts.loaders, strict=True):
            if number in positions:
                loader.passes.resume(positions[number])
        self._positions = {n: position for n, position in positions.items() if n not in here}
        self._at_epoch = state["loaders"]["at_epoch"]
        self._is_at_end_of_epochs = all(position["is_at_epoch"] for position in state["position"])
        self.saves.resume(state["save"])
        saved = {n: (each["passes"], each["batches"], each["is_open"]) for n, each in positions.items()}
        return not self.saves.is_awaited and (saved == here or not any(map(any, saved.values())))

    def come_to_save(self) -> bool:
        if self._loop.body is not None:
            raise CheckpointError(
                "save() of a checkpoint was called in a loop body.",
                why="the step is under way, and only whole steps are saved.",
                do="call it after the loop over batches; within it, every_steps and every_s save between two steps.",
            )
        if self.saves.come_by(self._epochs.num_calls, self._epochs.epoch):
            self._loop.arrive()
        return not self._loop.is_replaying

    def add_loader(self, loader: PreparedLoader) -> None:
        """One that is prepared after a state was restored has its position in it."""
        self._parts.loaders.append(loader)
        self._numbers.append(self._num_added)
        loader.passes.begin_stretch(self._stretch)
        if self._num_added in self._positions:
            loader.passes.resume(self._positions.pop(self._num_added))
        self._num_added += 1

    # What newcomers are told before they are given the rest.

    def number_of(self, loader: PreparedLoader) -> int:
        return next(n for n, other in zip(self._numbers, self._parts.loaders, strict=True) if other is loader)

    def describe_loaders(self) -> dict[str, Any]:
        """Where loaders are, and how many there were when the epoch began, as JSON has it."""
        return {"added": self._at_epoch, "loaders": {str(n): each for n, each in self._capture_positions().items()}}

    def resume_loaders(self, facts: dict[str, Any]) -> None:
        """Those that the script has not prepared yet have theirs when it does, with the number that they had there."""
        positions = {int(number): position for number, position in facts["loaders"].items()}
        for number, loader in zip(self._numbers, self._parts.loaders, strict=True):
            if number in positions:
                loader.passes.resume(positions.pop(number))
        self._positions, self._at_epoch = positions, facts["added"]
        self._num_added = max(self._num_added, self._at_epoch)

    # Loops over epochs.

    def begin_epochs(self) -> None:
        self._at_loop = capture_generators()

    def begin_epoch(self, is_resumed: bool) -> None:
        self.saves.begin_epoch()
        self._trail.begin_epoch(is_resumed)
        self._begin_stretch(stretch_in(self._epochs.num_calls))
        if is_resumed:
            self._num_added = max(self._num_added, self._at_epoch)
            for loader in self._parts.loaders:
                loader.passes.begin_resumed_epoch()
        else:
            self._evaluation.recollections.forget(EPOCH)
            self._at_epoch = self._num_added
            for loader in self._parts.loaders:
                loader.passes.begin_epoch()
        self._at_epoch_start = capture_generators()

    def describe_generators(self) -> Any:
        """As they were when the epoch began, as JSON has them; None if the loop has drawn nothing from them until then.

        A mark of every epoch has them, and states take 13 KB: most scripts draw nothing between their loops.
        """
        start = generators.as_plain(self._at_epoch_start)
        return None if start == generators.as_plain(self._at_loop) else start

    def begin_epoch_of_others(self, start: Any) -> None:
        """What another worker has described of the epoch that begins here."""
        self._at_epoch_start = self._at_loop if start is None else generators.from_plain(start)
        if self._at_epoch_start is not None:
            restore_generators(self._at_epoch_start)

    def end_epochs(self) -> None:
        self.saves.end_epochs(self._epochs.num_calls, self._epochs.epoch)
        if not self.saves.is_awaited:
            self._loop.arrive()
        self.saves.begin_epoch()
        self._at_epoch = self._num_added
        for loader in self._parts.loaders:
            loader.passes.begin_epoch()

    def end_stretch(self) -> None:
        """A loop over epochs has ended, was left, or was over when the run was saved."""
        self._trail.end_epochs(self._epochs.num_calls)
        self._begin_stretch(stretch_after(self._epochs.num_calls))

    def _begin_stretch(self, stretch: int) -> None:
        self._stretch = stretch
        for loader in self._parts.loaders:
            loader.passes.begin_stretch(stretch)

    def leave_out(self, goes_on: bool) -> bool:
        """The script has left out the last loop over epochs. Says whether the run was saved there, and not later."""
        is_here = self._is_at_end_of_epochs
        if is_here and (goes_on or not self.saves.is_awaited):
            self._loop.arrive()
        self.saves.begin_epoch()
        self._num_added = max(self._num_added, self._at_epoch)
        for loader in self._parts.loaders:
            loader.passes.begin_resumed_epoch()
        return is_here

    def _check(self, state: dict[str, Any]) -> None:
        if state.get("framework") != FRAMEWORK:
            raise CheckpointError(
                f"The saved state is one of {state.get('framework')}, and this run trains with PyTorch.",
                do="use another directory.",
            )
        _compare_tensors(dict(self._parts.named_tensors()), state["tensors"])
        for kind in _OBJECTS:
            have, saved = len(getattr(self._parts, kind)), len(state[kind])
            if have != saved:
                raise _other_run(
                    f"it has {saved} {kind}, and {have} {'is' if have == 1 else 'are'} prepared here",
                    "prepare the same objects before restoring, or begin a new run in another directory.",
                )
            for number, pair in enumerate(zip(self._parts.given[kind], state["given"][kind], strict=True), 1):
                _compare_classes(f"{kind.removesuffix('s')} {number}", *(each["class"] for each in pair))
        for number, (optimizer, saved) in enumerate(zip(self._parts.optimizers, state["optimizers"], strict=True), 1):
            _compare_groups(number, optimizer, saved)

    def _name_strangers(self) -> None:
        """Schedulers leave the first rates with an optimizer. Those that were not prepared are not in checkpoints."""
        known = (*self._parts.schedulers, *self._also.objects.values())
        scheduled = [id(getattr(scheduler, "optimizer", None)) for scheduler in known]
        for number, optimizer in enumerate(self._parts.optimizers, 1):
            if id(optimizer) not in scheduled and any("initial_lr" in group for group in optimizer.param_groups):
                self._tell(
                    f"optimizer {number} has a scheduler that was not given to strategy.prepare: its state is neither"
                    " saved nor handed to a worker that comes back, and learning rates may be others then; prepare it"
                )

    def _name_changes(self, saved: dict[str, list[Given]]) -> None:
        given = self._parts.given
        changes = [line for kind in _OBJECTS for line in list_changes(kind.removesuffix("s"), given[kind], saved[kind])]
        if changes:
            self._tell(
                f"the saved run goes on with its own values, not with those of this script: {'; '.join(changes)}"
            )
        self._parts.given = saved


def _compare_accumulations(here: int, saved: dict[str, Any]) -> None:
    if saved["batches_before"] and here not in (1, saved["num_batches"]):
        raise CheckpointError(
            f"The run was saved in the middle of an accumulation of {saved['num_batches']} batches, and the script asks"
            f" for {here}.",
            do=f"call strategy.accumulate({saved['num_batches']}) there, or begin a new run in another directory.",
        )


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


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _load(thing: Any, saved: dict[str, Any]) -> None:
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
