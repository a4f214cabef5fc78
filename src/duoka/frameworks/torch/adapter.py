"""PyTorch behind a strategy: takes models, optimizers, loaders, schedulers and scalers, and ties them to the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from duoka.collectives.collective import Collective
from duoka.devices.device import Device
from duoka.errors import MismatchError
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.placement_log import PlacementLog, make_placement_log
from duoka.frameworks.telling import Telling
from duoka.frameworks.torch.determinism import use_deterministic_kernels
from duoka.frameworks.torch.devices import native
from duoka.frameworks.torch.function.batches import Batches
from duoka.frameworks.torch.function.call import Calls
from duoka.frameworks.torch.function.differences import explain
from duoka.frameworks.torch.function.evaluation import Evaluator
from duoka.frameworks.torch.function.first_call import check_models
from duoka.frameworks.torch.function.loaders import Loaders
from duoka.frameworks.torch.function.rejoin import Rejoin
from duoka.frameworks.torch.function.seed import BaseSeed
from duoka.frameworks.torch.function.trained import Trained
from duoka.frameworks.torch.learning_rates import describe_rates
from duoka.frameworks.torch.loader_deaths import follow_from_now_on
from duoka.frameworks.torch.outsiders import end_watch
from duoka.frameworks.torch.plain.exchange import PlainExchange
from duoka.frameworks.torch.plain.loader import PreparedLoader, prepare_loader
from duoka.frameworks.torch.plain.loop import PlainLoop
from duoka.frameworks.torch.plain.steps import StepWatch
from duoka.frameworks.torch.prepared import Prepared
from duoka.frameworks.torch.start import agree_on_start, check_devices, check_layouts
from duoka.frameworks.torch.step_placement import ModuleWatch
from duoka.frameworks.torch.style import Styles
from duoka.frameworks.torch.sync_batchnorm import SyncedPart, sync_batch_norm
from duoka.frameworks.torch.tensors import Tensors
from duoka.frameworks.torch.training import Training
from duoka.frameworks.torch.transport import carry_tensors
from duoka.strategies.registered_state import RegisteredState
from duoka.strategies.strategy import Options
from duoka.strategies.training_loop import TrainingLoop

_STRATEGIES = "strategies of PyTorch"
_SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


class TorchAdapter(Training):
    is_known_when_prepared = True

    def __init__(
        self,
        collective: Collective,
        device: torch.device,
        options: Options | None = None,
        placement_log: PlacementLog | None = None,
    ) -> None:
        self._collective, self.device = collective, device
        self.options = options or Options()
        self._borders, is_synced = self.options.borders, self.options.sync_batchnorm
        if len(collective.workers) > 1:
            follow_from_now_on()
        self._parts = Prepared()
        self._models, self._optimizers = self._parts.models, self._parts.optimizers
        self._prepared: dict[int, Any] = {}
        self._base_seed = BaseSeed()
        self.tensors = Tensors(device)
        self.tell_once = Telling(collective).tell_once
        self.registered = RegisteredState(lambda value: isinstance(value, torch.Tensor))
        self.checks = Checks(collective, self.options.check_every, self.tell_once)
        is_first = not collective.count_up(_STRATEGIES)
        self._rejoin = Rejoin(collective.joining, is_only_strategy=is_first)
        self._styles = Styles(collective, self._begin_function, self._begin_plain, self.tell_once, is_synced=is_synced)
        self._training_loop = TrainingLoop(self)
        trained = Trained(collective, self._models, self._optimizers, is_synced=is_synced)
        self._calls = Calls(
            collective, trained, device, self._base_seed, self.tell_once, self.checks, is_synced=is_synced
        )
        self._loop = PlainLoop(collective, self._base_seed, self, self.tell_once)
        self._gradients = PlainExchange(
            collective, trained, self._loop.find_share, self._describe_rates, check=self.check_inside
        )
        self._steps = StepWatch(self)
        self._loaders = Loaders(
            collective, self._base_seed, device, self._styles.choose_function, self.tell_once, self._training_loop
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
        self._module_watch = None if placement_log is None else ModuleWatch(placement_log)
        self._end_watch: Callable[[], None] = _nothing
        self._make_state()
        if is_synced and collective.num_replicas > 1:
            sync_batch_norm(self, collective)

    # Preparing.

    def prepare(self, objects: Sequence[Any], *, is_sharded: bool = False) -> list[Any]:
        """Prepare what is given and return it in the same order. Models come first, whatever their place."""
        for thing in objects:
            if id(thing) in self._prepared:
                raise MismatchError(
                    f"This {type(thing).__name__} has been prepared already.",
                    do="call strategy.prepare once for each object.",
                )
        self._tell_if_late(objects)
        ordered = sorted(objects, key=lambda thing: not isinstance(thing, nn.Module))
        results = {id(thing): self._prepare_one(thing, is_sharded=is_sharded) for thing in ordered}
        self._prepared.update({id(thing): thing for thing in (*objects, *results.values())})
        if self._collective.num_replicas > 1 and not self._styles.is_function and self._models:
            self._gradients.watch()
        return [results[id(thing)] for thing in objects]

    def _tell_if_late(self, objects: Sequence[Any]) -> None:
        late = [type(thing).__name__ for thing in objects if not isinstance(thing, DataLoader)]
        if late and self.batch and self.is_state_wanted:
            self.tell_once(
                f"{late[0]} is prepared after training has begun: checkpoints from here on hold its state, and a script"
                " that is resumed from one stops, as it has not prepared it by then; prepare it before"
                " strategy.checkpoint"
            )

    def scope(self, owner: Any) -> AbstractContextManager[None]:
        raise self.refuse_scope()

    def _prepare_one(self, thing: Any, *, is_sharded: bool) -> Any:
        if isinstance(thing, nn.Module):
            return self._prepare_model(thing)
        if isinstance(thing, torch.optim.Optimizer):
            return self._prepare_optimizer(thing)
        if isinstance(thing, DataLoader):
            plain = _unprepared(thing)
            self._loaders.prepare(plain, is_sharded=is_sharded)
            return prepare_loader(plain, lambda: self._loop.walk(self._loaders.batches(plain)))
        if isinstance(thing, _SCHEDULERS):
            self._parts.add("schedulers", thing)
            return thing
        if isinstance(thing, torch.amp.GradScaler):
            self._parts.add("scalers", thing)
            return thing
        self._refuse(thing)

    def _refuse(self, thing: Any) -> NoReturn:
        if hasattr(thing, "step") and hasattr(thing, "state_dict"):
            raise MismatchError(
                f"A {type(thing).__name__} cannot be prepared, and need not be.",
                why="it is not a scheduler of torch.optim.lr_scheduler. The loop runs once per global batch on every"
                " worker, and so does its step.",
                do="leave it out of strategy.prepare, and step it on every worker as on one device. To save its state,"
                " name it in strategy.register.",
            )
        raise MismatchError(
            f"A {type(thing).__name__} cannot be prepared.",
            do="prepare models, optimizers, DataLoaders, LR schedulers and GradScalers; leave the rest as it is.",
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
        known = {id(p) for model in self._models for p in model.parameters()}
        if strangers := [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]:
            held = nn.ParameterList(strangers)
            check_devices(held, self.device)
            held.to(self.device)
            agree_on_start(held, self._collective)
        self._parts.add("optimizers", optimizer)
        self._steps.follow(optimizer)
        return optimizer

    def _describe_rates(self) -> list[str]:
        return describe_rates(self._optimizers, self._parts.schedulers)

    # The style.

    @property
    def is_only_strategy(self) -> bool:
        return self._collective.count(_STRATEGIES) == 1

    def choose_plain(self) -> None:
        """A plain loop over a prepared loader begins."""
        self._styles.choose_plain()

    def _begin_function(self) -> None:
        self._gradients.end()
        self._rejoin.begin()
        if self.options.sync_batchnorm:
            self._rejoin.refuse("sync_batchnorm=True computes one replica per worker, so all workers restart")

    def _begin_plain(self) -> None:
        if self._collective.num_replicas == 1:
            return
        if self._collective.rehearsal is not None:
            self._collective.rehearsal.note_plain()
        self._rejoin.begin()
        self._rejoin.refuse("a plain loop cannot compute its samples, so only all workers together can restart")
        self._gradients.end()  # its hooks are not the user's
        trained = self._calls.trained
        trained.scan()
        is_synced = self.options.sync_batchnorm
        check_models(trained.models, trained.parameters, trained.names, self.tell_once, is_synced=is_synced)
        self._gradients.watch()

    # Plain style.

    @property
    def is_evaluating(self) -> bool:
        return bool(self._models) and not any(model.training for model in self._models)

    def begin_batch(self) -> None:
        self._steps.begin_batch()
        if self._collective.num_replicas == 1:
            return
        self._gradients.check_complete()
        self._collective.work_on(self._num_steps, self._collective.replicas)
        self._gradients.watch()
        statistics = self._calls.trained.statistics
        if statistics.has_any:
            statistics.begin_batch()
            statistics.watch_still()
        self._watch_single_samples()

    def compare(self, number: int) -> None:
        self._calls.trained.scan()
        trained = self._calls.trained
        is_rehearsed = self._collective.rehearsal is not None
        self.checks.at_border(number, trained.state if is_rehearsed else trained.plain_state)

    def _watch_single_samples(self) -> None:
        """BatchNorm cannot normalise one sample: an error that names the layer."""
        self._end_watch()
        share = self._loop.share
        if share is not None and share.num_samples and not self.options.sync_batchnorm and not share.is_evaluation:
            replica, watch = self._collective.replicas[0], self._calls.single_samples.watch
            self._end_watch = watch(replica, share.num_samples, share.total, share.last_size)

    @property
    def synced_part(self) -> SyncedPart | None:
        """What `sync_batchnorm=True` has to know of the batch under way."""
        if self._styles.is_function:
            return self._calls.synced_part
        share = self._loop.share
        if share is None:
            return None
        factor = self._gradients.weighing.factor
        weight = share.weight if factor is None or not share.num_samples else factor
        return SyncedPart(share.num_samples, weight)

    def no_sync(self) -> AbstractContextManager[None]:
        if self._styles.is_function:
            raise MismatchError(
                "strategy.no_sync was called in a script that trains by strategy.backward.",
                do="call strategy.backward several times before optimizer.step: each call adds to p.grad.",
            )
        return nullcontext() if self._collective.num_replicas == 1 else self._gradients.no_sync()

    @property
    def num_samples(self) -> int | None:
        """Of this worker in the batch under way; 0 where it runs on samples of others. None outside of batches."""
        share = self._loop.share
        return None if share is None else share.num_samples

    @property
    def position(self) -> tuple[int, int] | None:
        share = self._loop.share
        return None if share is None else (self._loop.num_batches, share.total)

    @property
    def num_replicas(self) -> int:
        return self._collective.num_replicas

    @property
    def is_plain(self) -> bool:
        return self._styles.is_plain

    @property
    def is_function(self) -> bool:
        return self._styles.is_function

    @property
    def has_kept_gradients(self) -> bool:
        return self._gradients.has_kept

    @property
    def is_taken_only(self) -> bool:
        return self._gradients.is_taken_only

    def count_step(self) -> None:
        self._num_steps += 1

    def knows(self, parameters: set[int]) -> bool:
        """Whether some of these belong to a prepared model."""
        return any(id(p) in parameters for model in self._models for p in model.parameters())

    # What the strategy asks.

    @property
    def evaluation(self) -> TorchAdapter:
        return self

    replicas_of_last_loop = None

    def refuse(self, call: str) -> None:
        """Raise where not all workers come by: in a function, and in an evaluation loop of this worker's samples."""
        self._calls.refuse_inside(call)
        self._loop.refuse(call)

    def refuse_number(self, call: str) -> None:
        self._styles.refuse_number(call)

    def weigh(self, loss: torch.Tensor, count: Any) -> Any:
        """The loss is a mean over `count` things (tokens), or, with None, a sum: gradients are weighted accordingly."""
        if self._calls.is_inside:
            return self._calls.weigh(loss, count)
        if self._collective.num_replicas == 1:
            return loss
        return self._gradients.weighing.weigh(loss, count, self._loop.share)

    def backward(self, function: Any, args: Sequence[Any], scaler: Any, check: bool) -> Any:
        self._styles.choose_function()
        self.check_inside()
        try:
            return self._calls.backward(function, args, scaler, self._describe_rates(), check=check)
        except MismatchError as error:
            if error.calls is None:
                raise
            raise explain(error, self._calls.number) from None

    def batches(self, loader: Any) -> Batches:
        """The global batches of a loader as handles; the same object for the same loader."""
        if not isinstance(loader, DataLoader):
            raise MismatchError(
                f"strategy.batches cannot split a {type(loader).__name__}.",
                do="pass a DataLoader, prepared or not; batches of your own go to strategy.backward as tensors.",
            )
        batches = self._loaders.batches(_unprepared(loader))
        if batches.is_sharded:
            raise MismatchError(
                "strategy.batches was called with a loader that was prepared with sharded=True.",
                why="every worker draws batches of its own from it, so there are no global batches.",
                do="loop over it in plain style, `for x, y in loader:`, or prepare it without sharded=True.",
            )
        return batches

    def rows(self, tensor: Any) -> Any:
        return self._calls.rows(tensor)

    def evaluate(self, function: Any, loader: Any) -> Any:
        """sum / count of the pairs that the function returns, over the batches of all replicas."""
        self.refuse("strategy.evaluate")
        if not isinstance(loader, DataLoader):
            raise MismatchError(
                f"strategy.evaluate cannot split a {type(loader).__name__}.",
                do="pass a DataLoader, prepared or not.",
            )
        with self._loop.outside():
            return self._evaluator.evaluate(function, _unprepared(loader))


def _unprepared(loader: DataLoader[Any]) -> DataLoader[Any]:
    return loader.unprepared if isinstance(loader, PreparedLoader) else loader


def _nothing() -> None:
    pass


def _refuse_uninitialised(model: nn.Module) -> None:
    names = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if names:
        raise MismatchError(
            f"The model has a parameter without a shape: {names[0]}.",
            why="lazy layers learn their shapes from the first batch, and all workers must begin with equal weights.",
            do="run the model on one batch before strategy.prepare: model(torch.zeros(1, ...)).",
        )


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
    return TorchAdapter(carry_tensors(collective, place, options), place, options, log)
