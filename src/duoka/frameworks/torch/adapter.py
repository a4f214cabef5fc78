"""PyTorch behind a strategy: takes models, optimizers, loaders, schedulers and scalers, and ties them to the run."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from duoka.collectives.arrays import as_array
from duoka.collectives.collective import Collective
from duoka.data.position import KEPT, Epochs, walked_again
from duoka.data.trail import Place, Trail
from duoka.devices.device import Device
from duoka.errors import CheckpointError, MismatchError
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.placement_log import PlacementLog, make_placement_log
from duoka.frameworks.telling import Telling
from duoka.frameworks.torch.accumulation import Accumulation
from duoka.frameworks.torch.backward import listen_to_backward
from duoka.frameworks.torch.capture import Capture
from duoka.frameworks.torch.contributions import Contributions, Kind, Pending, mean_of, tree_sum, weighed
from duoka.frameworks.torch.course import Course
from duoka.frameworks.torch.determinism import use_deterministic_kernels
from duoka.frameworks.torch.devices import native
from duoka.frameworks.torch.evaluation import Evaluation
from duoka.frameworks.torch.function.batches import Batches
from duoka.frameworks.torch.function.call import Calls
from duoka.frameworks.torch.function.differences import explain
from duoka.frameworks.torch.function.evaluation import Evaluator
from duoka.frameworks.torch.function.loaders import Loaders
from duoka.frameworks.torch.function.rejoin import OUTSIDE, SECOND_LOOP, Rejoin
from duoka.frameworks.torch.function.seed import BaseSeed
from duoka.frameworks.torch.function.style import Styles
from duoka.frameworks.torch.function.train_state import STYLE as FUNCTION_STYLE
from duoka.frameworks.torch.function.train_state import TrainState, refuse_other_framework
from duoka.frameworks.torch.function.trained import Trained
from duoka.frameworks.torch.generators import capture_generators, restore_generators
from duoka.frameworks.torch.gradients import Gradients
from duoka.frameworks.torch.loader import PreparedLoader
from duoka.frameworks.torch.loader_deaths import follow_from_now_on
from duoka.frameworks.torch.loop import Loop
from duoka.frameworks.torch.newcomers import Newcomers
from duoka.frameworks.torch.optimizer import describe_rates, hold_back, prepare_optimizer, watch_steps
from duoka.frameworks.torch.outsiders import end_watch, has_gradients
from duoka.frameworks.torch.prepared import Prepared
from duoka.frameworks.torch.start import agree_on_start, check_devices, check_layouts
from duoka.frameworks.torch.step_placement import ModuleWatch
from duoka.frameworks.torch.sync_batchnorm import sync_batch_norm
from duoka.frameworks.torch.tensors import Tensors
from duoka.frameworks.torch.transport import carry_tensors
from duoka.strategies.registered_state import RegisteredState
from duoka.strategies.strategy import Options
from duoka.strategies.training_loop import Position, TrainingLoop

_prepared_anywhere: WeakSet[torch.optim.Optimizer] = WeakSet()  # a script may have several strategies


class TorchAdapter:
    is_known_when_prepared = True

    def __init__(
        self,
        collective: Collective,
        seed: int,
        device: torch.device,
        options: Options | None = None,
        placement_log: PlacementLog | None = None,
    ) -> None:
        self._collective = collective
        self.device = device
        self.options = options or Options()
        if len(collective.workers) > 1:
            follow_from_now_on()
        self.loop = Loop(seed, collective.num_replicas)
        self._parts = Prepared()
        self._models, self._optimizers = self._parts.models, self._parts.optimizers
        self.tell_once = Telling(collective).tell_once
        self.trail = Trail(
            self._describe, self._take, capture_generators, lambda: self.loop.is_replaying, self.tell_once
        )
        self.evaluation = Evaluation(collective, self.loop, device, self._models, self.tell_once, self.trail)
        self.tensors = Tensors(device)
        self.checks = Checks(collective, self.options.check_every, self.tell_once)
        self._prepared: dict[int, Any] = {}
        self._contributions = Contributions(self.tell_once)
        self.gradients = Gradients(
            collective,
            self.loop,
            self.tell_once,
            self._contributions,
            self._describe_rates,
        )
        self._rejoin = Rejoin(collective.joining, is_only_strategy=not self.gradients.ordinal)
        self._styles = Styles(collective, self._rejoin.begin, self.tell_once, is_synced=self.options.sync_batchnorm)
        self._base_seed = BaseSeed()
        self._calls = Calls(
            collective,
            Trained(collective, self._models, self._optimizers),
            device,
            self._base_seed,
            self.tell_once,
            self.checks,
        )
        self.evaluation.refuse_in_function = self._calls.refuse_inside
        self.registered = RegisteredState(lambda value: isinstance(value, torch.Tensor))
        self._training_loop = TrainingLoop(self)
        self._loaders = Loaders(
            collective, self._base_seed, device, self._styles.choose_function, self.tell_once, self._training_loop
        )
        self._train_state = TrainState(
            self._parts, self._calls.trained, self._calls, self._loaders, self._training_loop
        )
        self._evaluator = Evaluator(
            collective,
            self._models,
            device,
            self._base_seed,
            self.tell_once,
            self._calls.inside,
            self._loaders,
            lambda: self._calls.trained.known,
        )
        self._newcomers = Newcomers(collective.joining, self)
        self._course = Course(
            collective,
            self.loop,
            self.gradients,
            self._contributions,
            self.evaluation,
            self._models,
            self._optimizers,
            self.checks,
            self.tell_once,
            is_synced=self.options.sync_batchnorm,
            at_draw=self.choose_plain,
            at_start=self._begin_loop,
            at_end=self.trail.end_pass,
            at_border=self._come_by_border,
            is_saved=lambda: self.options.borders.is_state_wanted,
            newcomers=self._newcomers,
        )
        self.epochs = Epochs(
            self._begin_epochs,
            self._begin_epoch,
            self._leave_out,
            self._end_epochs,
            self._end_stretch,
            self._come_by_finished,
            self._walk_again,
        )
        self._capture = Capture(
            self._parts,
            self.loop,
            self.gradients,
            self.evaluation,
            self.epochs,
            self.gradients.refresh,
            self.tell_once,
            self.trail,
            self.options.borders.also,
        )
        self._module_watch = None if placement_log is None else ModuleWatch(placement_log)
        self._has_run_closure = False
        if self.loop.is_managed:
            watch_steps(self._look_before_step)

    # Plain style: what it intercepts is intercepted when the first plain loop begins, not before.

    def choose_plain(self) -> None:
        """A plain loop over a prepared loader begins."""
        if not self._styles.is_plain:
            self._styles.choose_plain()
            self._engage()

    def _engage(self) -> None:
        for number, optimizer in enumerate(self._optimizers, start=1):
            self._engage_optimizer(optimizer, number)
        for number, scheduler in enumerate(self._parts.schedulers, start=1):
            self._engage_scheduler(scheduler, number)
        for number, scaler in enumerate(self._parts.scalers, start=1):
            self._engage_scaler(scaler, number)
        if self.loop.is_managed:
            self._start_managing()
        self._course.rescan()

    def _engage_optimizer(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        self._refuse_parameters_of_others(optimizer)
        prepare_optimizer(optimizer, self.loop, f"optimizer {number}", self._check_before_step)

    def _engage_scheduler(self, scheduler: Any, number: int) -> None:
        hold_back(scheduler, ("step",), self.loop, f"scheduler {number}")

    def _engage_scaler(self, scaler: Any, number: int) -> None:
        hold_back(scaler, ("unscale_", "step", "update"), self.loop, f"scaler {number}")

    def _start_managing(self) -> None:
        self.loop.is_managed = True
        listen_to_backward(self.gradients)
        if self.options.sync_batchnorm and not self.loop.runs_whole_shares:
            self.loop.runs_whole_shares = True
            sync_batch_norm(self.loop, self._collective)
            if self._collective.num_replicas > len(self._collective.workers):
                self.tell_once(
                    "sync_batchnorm: each worker runs its rows as one batch."
                    " The numbers are those of one device; equal bits need an equal number of workers"
                )

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Prepare what is given and return it in the same order. Models come first, whatever their place."""
        for thing in objects:
            if id(thing) in self._prepared:
                raise MismatchError(
                    f"This {type(thing).__name__} has been prepared already.",
                    do="call strategy.prepare once for each object.",
                )
        self._tell_if_late(objects)
        ordered = sorted(objects, key=lambda thing: not isinstance(thing, nn.Module))
        results = {id(thing): self._prepare_one(thing) for thing in ordered}
        self._prepared.update({id(thing): thing for thing in (*objects, *results.values())})
        if self._styles.is_plain:
            self._course.rescan()
        return [results[id(thing)] for thing in objects]

    def _tell_if_late(self, objects: Sequence[Any]) -> None:
        late = [type(thing).__name__ for thing in objects if not isinstance(thing, DataLoader)]
        if late and self.loop.batch and self.options.borders.is_state_wanted:
            self.tell_once(
                f"{late[0]} is prepared after training has begun: checkpoints from here on hold its state, and a script"
                " that is resumed from one stops, as it has not prepared it by then; prepare it before"
                " strategy.checkpoint"
            )

    def scope(self, owner: Any) -> AbstractContextManager[None]:
        raise MismatchError(
            "This strategy has prepared PyTorch models; its scope is for Keras models.",
            do="pass models, optimizers and loaders to strategy.prepare.",
        )

    def _prepare_one(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return self._prepare_model(thing)
        if isinstance(thing, torch.optim.Optimizer):
            return self._prepare_optimizer(thing)
        if isinstance(thing, DataLoader):
            loader = PreparedLoader(thing, self._collective, self.loop, self.device, self._course)
            self._loaders.prepare(thing)
            self._capture.add_loader(loader)
            return loader
        if isinstance(thing, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)):
            self._parts.add("schedulers", thing)
            if self._styles.is_plain:
                self._engage_scheduler(thing, len(self._parts.schedulers))
            return thing
        if isinstance(thing, torch.amp.GradScaler):
            self._parts.add("scalers", thing)
            if self._styles.is_plain:
                self._engage_scaler(thing, len(self._parts.scalers))
            return thing
        if hasattr(thing, "step") and hasattr(thing, "state_dict"):
            raise self._unknown_scheduler(thing)
        raise MismatchError(
            f"A {type(thing).__name__} cannot be prepared.",
            do="prepare models, optimizers, DataLoaders, LR schedulers and GradScalers; leave the rest as it is.",
        )

    def _unknown_scheduler(self, thing: Any) -> MismatchError:
        """A scheduler of timm's or of the script's own: outside of functions it steps as it does on one device."""
        num_replicas, num_workers = self._collective.num_replicas, len(self._collective.workers)
        do = "leave it out of strategy.prepare, and step it on every worker as on one device."
        if num_replicas > num_workers:
            do += (
                f" A plain loop over the loader would step it once for each of the {num_replicas} replicas: train by"
                " strategy.backward, or use one replica per worker."
            )
        return MismatchError(
            f"A {type(thing).__name__} cannot be prepared, and need not be.",
            why="it is not a scheduler of torch.optim.lr_scheduler. In function style (strategy.backward), and in a"
            " plain loop with one replica per worker, the loop runs once per global batch, and so does its step.",
            do=do,
        )

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        check_devices(model, self.device)
        _refuse_uninitialised(model)
        check_layouts(model)
        end_watch()
        model.to(self.device)
        self._models.append(model)
        agree_on_start(model, self._collective)
        if self._module_watch is not None:
            self._module_watch.add(model)
        return model

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Parameters that it alone holds are prepared with it: a temperature, an embedding of its own."""
        end_watch()
        _prepared_anywhere.add(optimizer)
        # A script may drop its strategy. Without this reference, the look at each step would be dropped with it.
        optimizer.register_step_pre_hook(self._stay)
        if strangers := self._list_parameters_of_others(optimizer):
            held = nn.ParameterList(strangers)
            check_devices(held, self.device)
            held.to(self.device)
            agree_on_start(held, self._collective)
        self._parts.add("optimizers", optimizer)
        if self._styles.is_plain:
            self._engage_optimizer(optimizer, len(self._optimizers))
        return optimizer

    def _list_parameters_of_others(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        known = {id(p) for model in self._models for p in model.parameters()}
        return [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]

    def _refuse_parameters_of_others(self, optimizer: torch.optim.Optimizer) -> None:
        if strangers := self._list_parameters_of_others(optimizer):
            raise MismatchError(
                f"The optimizer holds {len(strangers)} parameters of no prepared model (shape"
                f" {tuple(strangers[0].shape)} first).",
                why="their gradients would never be exchanged.",
                do="prepare the model whose parameters the optimizer was made with, or train by strategy.backward.",
            )

    def _stay(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Live as long as the prepared optimizer."""

    def _look_before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before any optimizer steps: one on a prepared model whose gradients nobody has exchanged is found here."""
        if self._styles.is_function or not self.loop.is_managed:
            return
        if not self._styles.is_plain:
            if not self._holds_prepared(optimizer):
                return
            if _has_closure(args, kwargs) and not self._has_run_closure:
                self._has_run_closure = True  # which may call strategy.backward: the next step will tell
                return
            self._styles.choose_plain()
            self._engage()
            if any(optimizer is known for known in self._optimizers):
                self.gradients.note_gradients()
                self._check_before_step(optimizer)
                return
        self._refuse_strangers(optimizer)

    def _holds_prepared(self, optimizer: Any) -> bool:
        known = {id(p) for model in self._models for p in model.parameters()}
        return any(id(p) in known for group in optimizer.param_groups for p in group["params"])

    def _refuse_strangers(self, optimizer: Any) -> None:
        """An optimizer that was not prepared would step in every body, or on one replica's gradient."""
        if any(optimizer is known for known in self._optimizers):
            return
        if self.gradients.holds_any(optimizer):
            self.loop.is_interrupted = True
            raise MismatchError(
                f"This {type(optimizer).__name__} steps on a prepared model, and was not prepared itself.",
                why="it would step once for each replica, on a gradient that is not the whole batch's.",
                do="pass the optimizer to strategy.prepare, too.",
            )
        # Outside of loops a script may train something else by itself, whole on every worker.
        if self.loop.body is None or optimizer in _prepared_anywhere or not has_gradients(optimizer):
            return
        gc.collect()  # ends the iterator of a loop that an error has left
        if self.loop.body is not None:
            self.loop.is_interrupted = True
            raise MismatchError(
                f"This {type(optimizer).__name__} steps on parameters that were not prepared, and the loader was.",
                why="each worker would train a model of its own, on its own samples: no gradient is exchanged.",
                do="pass all of them: model, optimizer, loader = strategy.prepare(model, optimizer, loader).",
            )

    def _check_before_step(self, optimizer: Any) -> None:
        if self.loop.is_managed and self.evaluation.is_open:
            raise MismatchError(
                "optimizer.step was called inside an evaluation loop.",
                why="the loader was iterated without gradients, or with the model in eval mode: then it gives blocks.",
                do="call model.train() before the loop; to train with layers in eval mode, set those layers alone.",
            )
        if self.loop.body is None:
            self._course.rescan()
            self.gradients.exchange_outside(optimizer)
        else:
            self.gradients.check_before_step(optimizer)

    def _describe_rates(self) -> list[str]:
        return describe_rates(self._optimizers, self._parts.schedulers)

    # What the strategy asks.

    @property
    def step(self) -> int:
        return self._calls.number if self._styles.is_function else self.loop.step

    @property
    def batch(self) -> int:
        return self._calls.number if self._styles.is_function else self.loop.batch

    @property
    def position(self) -> tuple[int, int] | None:
        return None if self.loop.body is None else (self.loop.batch, self.loop.body.total_rows)

    @property
    def stepped(self) -> bool:
        body = self.loop.body
        if body is not None:
            body.has_asked = True  # what it does now may depend on the answer
        return body is None or self.loop.may_step

    @property
    def count(self) -> int | None:
        return None if self.loop.body is None else self.loop.body.rows

    def accumulate(self, num_batches: int) -> None:
        # What a restored state has added up is put back where the script comes to its place; until then it may call
        # this for loops that are over, with other numbers.
        is_between = self.loop.is_replaying or not self.gradients.accumulation.batches_before
        if self.loop.body is not None or not is_between:
            raise MismatchError(
                "accumulate was called in the middle of a batch, or of an accumulation.",
                do="call strategy.accumulate(k) before the loop.",
            )
        self.gradients.accumulation = Accumulation(num_batches)
        self._styles.accumulate(num_batches)
        if num_batches > 1 and not self.loop.is_managed:
            self.loop.is_managed = True
            self.choose_plain() if not self._styles.is_plain else self._start_managing()
            self._course.rescan()

    @property
    def first_batch(self) -> int:
        return self.loop.first_batch

    def come_to_end(self) -> None:
        """A batch that was begun and is not left is complete on this number of workers, or not on another one."""
        loop = self._training_loop
        if self._styles.is_function:
            if loop.has_begun and not loop.is_over and not loop.is_pending:
                loop.finish()
                self.options.borders.at_end(self)
            return
        body = self.loop.body
        if body is not None and body.backwards and self.loop.is_managed:
            self.tell_once(
                "the script has ended in the middle of a batch, whose iterator it keeps: on another number of workers"
                " it ends with other weights; leave such a loop by `if strategy.step == n: break`, behind the line that"
                " draws the batch"
            )

    def capture(self) -> dict[str, Any]:
        if self._styles.is_function:
            return self._capture_function_style()
        return self._capture.capture() | {"agreed_step": self.checks.agreed_step}

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_framework(state)
        if state.get("style") == FUNCTION_STYLE:
            self._train_state.check(state)
            self._training_loop.resume(state)
            return
        self._capture.restore(state)
        agreed_step = state.get("agreed_step")  # None: never compared, but from here on all have this state
        self.checks.agreed_step = state["step"] if agreed_step is None else agreed_step

    def _describe(self, largest_bytes: int) -> Place:
        """What is known of this place between loops, for a script that comes by it again."""
        counts = [self.loop.step, self.loop.batch, *self.evaluation.capture()]
        also, is_whole = self.options.borders.also.look(largest_bytes)
        return Place(counts, also, capture_generators(), is_whole)

    def _take(self, place: Place) -> None:
        self.loop.step, self.loop.batch, *evaluations = place.counts
        self.evaluation.restore(evaluations)
        self.options.borders.also.take(place.also)
        if place.generators is not None:
            restore_generators(place.generators)

    # Function style: boundaries and state; see `training_loop.py`.

    def _capture_function_style(self) -> dict[str, Any]:
        number, position = self._calls.number, self._training_loop.position
        facts = {"framework": "torch", "style": FUNCTION_STYLE, "step": number, "batch": number}
        facts |= {"epoch": 0 if position is None else position.number, "agreed_step": self.checks.agreed_step}
        return facts | self._train_state.capture(self.registered)

    @property
    def boundary(self) -> Position | None:
        """Where the script is in its loop, for telling two states of one step apart."""
        return self._training_loop.position if self._styles.is_function else None

    @property
    def is_state_wanted(self) -> bool:
        return self.options.borders.is_state_wanted

    def _resume_rehearsal(self) -> None:
        rehearsal = self._collective.rehearsal
        if rehearsal is not None and (state := rehearsal.load_state()) is not None:
            self.restore(state)

    def walk_epochs(self, num_epochs: int) -> Iterator[int]:
        self._resume_rehearsal()
        if self._rejoin.follow() or self._styles.is_function or self._training_loop.is_pending:
            return self._training_loop.epochs(num_epochs)
        epochs = self.epochs.walk(num_epochs)
        return epochs if self._styles.is_plain else self._training_loop.follow(epochs)

    def walk_steps(self, num_steps: int) -> Iterator[int]:
        self._resume_rehearsal()
        self._rejoin.follow()
        self._styles.choose_function()
        return self._training_loop.steps(num_steps)

    def at_start(self, *, is_second: bool) -> None:
        self.options.borders.at_start(self)
        if is_second:
            self._rejoin.refuse(SECOND_LOOP)
        if self._rejoin.is_arriving:
            self._training_loop.resume(self._rejoin.await_state())

    @property
    def is_arriving(self) -> bool:
        return self._rejoin.is_arriving

    def arrive(self, epoch: int) -> dict[str, Any]:
        return self._rejoin.join(epoch)

    def begin_epoch(self) -> None:
        self._loaders.begin_epoch()
        self._train_state.begin_epoch()

    def at_boundary(self) -> None:
        if self._styles.is_function:
            self._rejoin.allow()
            if (rehearsal := self._collective.rehearsal) is not None and (position := self.boundary) is not None:
                rehearsal.at_training_boundary(self._calls.number, position.describe(), self.capture)
            self.options.borders.at_border(self)

    def at_end(self) -> None:
        self.options.borders.at_end(self)

    def put(self, state: dict[str, Any], *, is_again: bool) -> None:
        self._styles.choose_function()
        lines = [*self._train_state.check(state), *self.registered.check(state["registered"])]
        if lines and not is_again:
            self.tell_once(f"the run continues with the saved values: {'; '.join(lines)}")
        self._train_state.put(state, self.registered, is_again=is_again)
        if (rehearsal := self._collective.rehearsal) is not None:
            rehearsal.note_resumed()

    def tell(self, text: str) -> None:
        self.tell_once(text)

    def _begin_loop(self) -> None:
        self._capture.saves.begin_pass()
        self.options.borders.at_start(self)
        self.trail.begin_pass()

    def _come_by_border(self, compare: Callable[[], None]) -> None:
        self._capture.saves.begin_step()
        self.options.borders.at_border(self, compare)

    @property
    def is_repeating(self) -> bool:
        return self._training_loop.is_pending or (self.loop.is_replaying and not self.trail.is_at_top)

    def come_to_save(self) -> bool:
        if self._styles.is_function:
            raise CheckpointError(
                "save() of a checkpoint was called in a script that trains by strategy.backward.",
                why="state is saved at step boundaries, in strategy.epochs and strategy.steps.",
                do="use every_steps= or every_s= of strategy.checkpoint. To write weights at any place, use"
                " strategy.save(path, model.state_dict()).",
            )
        return self._capture.come_to_save()

    def _begin_epochs(self) -> None:
        if self.epochs.is_inside and self.options.borders.is_state_wanted:
            self.tell_once(KEPT)
        self.options.borders.at_start(self)
        self._capture.begin_epochs()
        self._newcomers.begin_epochs()

    def _begin_epoch(self, is_resumed: bool) -> None:
        self._capture.begin_epoch(is_resumed)
        self._newcomers.begin_epoch(is_resumed)

    @property
    def loaders(self) -> list[PreparedLoader]:
        return self._parts.loaders

    def number_of(self, loader: PreparedLoader) -> int:
        return self._capture.number_of(loader)

    def describe_loaders(self) -> dict[str, Any]:
        return self._capture.describe_loaders()

    def resume_loaders(self, facts: dict[str, Any]) -> None:
        self._capture.resume_loaders(facts)

    def describe_generators(self) -> Any:
        return self._capture.describe_generators()

    def begin_epoch_of_others(self, generators: Any) -> None:
        self._capture.begin_epoch_of_others(generators)

    def _leave_out(self, goes_on: bool) -> bool:
        self._end_stretch()
        self._newcomers.come_by_finished(is_last=True)
        return self._capture.leave_out(goes_on)

    def _walk_again(self) -> None:
        if self.options.borders.is_state_wanted:
            raise walked_again()

    def _end_stretch(self) -> None:
        self._capture.end_stretch()

    def _come_by_finished(self) -> None:
        self._end_stretch()
        self._newcomers.come_by_finished(is_last=False)

    def _end_epochs(self) -> None:
        if self._styles.is_function:
            self._training_loop.end_following()
        self._capture.end_epochs()
        self._end_stretch()
        self.options.borders.at_end(self)

    def weigh(self, loss: torch.Tensor, count: Any) -> torch.Tensor:
        """The loss is a mean over `count` things (tokens), or, with None, a sum: gradients are weighted accordingly."""
        if self._calls.is_inside:
            return self._calls.weigh(loss, count)
        with self.loop.noting_errors():
            return self._weigh(loss, count)

    def _weigh(self, loss: torch.Tensor, count: Any) -> torch.Tensor:
        body = self.loop.body
        if body is None or not self.loop.is_managed:
            return loss
        if count is None:
            # A sum over rows: undo the share, so that the replicas' gradients simply add up.
            body.is_added = True
            return loss / body.weight if body.rows else loss
        given = float(count)
        if not 0 <= given < math.inf:
            raise MismatchError(f"A count of {count} was given with strategy.weigh.", do="give how many things it is.")
        if body.count not in (None, given):
            raise MismatchError(
                f"strategy.weigh was given two counts, {body.count:g} and {given:g}, before one backward.",
                do="weigh the whole loss once, or call backward for each of its terms.",
            )
        body.count = given
        if not self.options.sync_batchnorm or not body.rows:
            return loss
        # A worker that counts nothing still takes part in everybody's statistics: its gradient must not be left out.
        if given == 0 and bool(loss.detach().isnan()):
            raise MismatchError(
                "A loss over nothing is NaN, and sync_batchnorm needs its gradient.",
                do="divide a sum by max(count, 1), so that a loss over nothing is zero.",
            )
        body.sum_weight = 1.0
        return loss * given

    def contribute(self, kind: str, value: Any, count: Any) -> Pending | None:
        """Inside a body: hand in this replica's number. None outside of bodies."""
        self._styles.refuse_number(kind)
        body = self.loop.body
        if body is None:
            return None
        body.record(kind)
        value = self.tensors.on_host(value)
        for replica in body.replicas[1:]:  # their rows are in the first one's value
            self._contributions.add(replica, _KINDS[kind].nothing, _KINDS[kind])
        if kind == "gather":
            given: Any = as_array(value) if body.rows else None
        elif kind == "sum":
            given = as_array(value).astype(np.float64) if body.rows else None
        else:
            rows = body.rows if count is None else float(count)
            given = weighed(value, rows if body.rows else 0)
        return self._contributions.add(body.replica, given, _KINDS[kind])

    # Function style.

    def backward(self, function: Any, args: Sequence[Any], scaler: Any, check: bool) -> Any:
        self._styles.choose_function()
        if not self._training_loop.is_inside:
            if self.options.borders.is_state_wanted:
                self._training_loop.check_inside()
            if self._rejoin.is_possible:
                self._rejoin.refuse(OUTSIDE)
        try:
            return self._calls.backward(function, args, scaler, self._describe_rates(), check=check)
        except MismatchError as error:
            if error.calls is None:
                raise
            raise explain(error, self._calls.number) from None

    def batches(self, loader: Any) -> Batches:
        """The global batches of a loader as handles; the same object for the same loader."""
        plain = loader.unprepared if isinstance(loader, PreparedLoader) else loader
        if not isinstance(plain, DataLoader):
            raise MismatchError(
                f"strategy.batches cannot split a {type(loader).__name__}.",
                do="pass a DataLoader, prepared or not; batches of your own go to strategy.backward as tensors.",
            )
        return self._loaders.batches(plain)

    def rows(self, tensor: Any) -> Any:
        return self._calls.rows(tensor)

    def evaluate(self, function: Any, loader: Any) -> Any:
        """sum / count of the pairs that the function returns, over the batches of all replicas."""
        self._calls.refuse_inside("strategy.evaluate")
        if self._styles.is_plain or (self.is_state_wanted and not self._styles.is_function):
            return self.evaluation.evaluate(function, loader)
        plain = loader.unprepared if isinstance(loader, PreparedLoader) else loader
        if not isinstance(plain, DataLoader):
            raise MismatchError(
                f"strategy.evaluate cannot split a {type(loader).__name__}.",
                do="give it a DataLoader, prepared or not.",
            )
        return self._evaluator.evaluate(function, plain)


def _refuse_uninitialised(model: nn.Module) -> None:
    names = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if names:
        raise MismatchError(
            f"The model has a parameter without a shape: {names[0]}.",
            why="lazy layers learn their shapes from the first batch, and all workers must begin with equal weights.",
            do="run the model on one batch before strategy.prepare: model(torch.zeros(1, ...)).",
        )


def _has_closure(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Of the arguments of an optimizer's step; the first one is the optimizer."""
    return any(callable(arg) for arg in (*args[1:], *kwargs.values()))


def _without_none(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


_KINDS = {"gather": Kind(_without_none), "sum": Kind(tree_sum), "mean": Kind(mean_of, [None, 0.0])}


def make_adapter(collective: Collective, seed: int, device: Device, options: Options) -> TorchAdapter:
    if options.share_reading:
        raise MismatchError(
            "share_reading=True has no meaning for PyTorch loops: it is for Keras's fit.",
            do="leave it out.",
        )
    place = native(device, is_only_card=options.sees_only_its_card)
    if options.exact:
        use_deterministic_kernels()
    log = make_placement_log(collective, device, options)
    return TorchAdapter(carry_tensors(collective, place, options), seed, place, options, log)
