"""The whole state of a PyTorch run at a border between steps, and back. Tensors are given as they are, not copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from duoka.data import generators
from duoka.data.position import Epochs, Saves, stretch_after, stretch_in
from duoka.data.trail import EPOCH, Trail
from duoka.errors import CheckpointError
from duoka.frameworks.torch.course import refusal
from duoka.frameworks.torch.evaluation import Evaluation
from duoka.frameworks.torch.generators import capture_generators, restore_generators
from duoka.frameworks.torch.given import Given
from duoka.frameworks.torch.gradients import Gradients
from duoka.frameworks.torch.loader import PreparedLoader
from duoka.frameworks.torch.loop import Loop
from duoka.frameworks.torch.prepared import OBJECTS, Prepared, load
from duoka.strategies.also import Also

FRAMEWORK = "torch"


class Capture:
    """Takes a run's state apart, and puts it together again."""

    def __init__(
        self,
        parts: Prepared,
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
        state: dict[str, Any] = {name: [thing.state_dict() for thing in getattr(parts, name)] for name in OBJECTS}
        return state | {
            "framework": FRAMEWORK,
            "given": parts.given,
            "tensors": dict(parts.named_tensors()),
            "frozen": [name for name, p in parts.named_parameters().items() if not p.requires_grad],
            "evaluating": [name for name, module in parts.named_modules() if not module.training],
            "extra": parts.extra_states(),
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
        self._put(state if is_here else state | {kind: copy.deepcopy(state[kind]) for kind in (*OBJECTS, "extra")})
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
        for kind in OBJECTS:
            for thing, saved in zip(getattr(parts, kind), state[kind], strict=True):
                load(thing, saved)
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
        self._parts.check(dict(self._parts.named_tensors()), state["tensors"], state)

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
        if changes := self._parts.list_changes(saved):
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
