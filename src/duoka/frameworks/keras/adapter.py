"""Keras behind a strategy: ties models to the run, whichever backend Keras runs on."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from duoka.collectives.collective import Collective
from duoka.collectives.deeds import Deeds
from duoka.data.position import Epochs
from duoka.devices.device import Device
from duoka.errors import CheckpointError, MismatchError
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.exchange.memory import Memory
from duoka.frameworks.keras.alone import LoneModel
from duoka.frameworks.keras.attachment import Attachment, is_attached
from duoka.frameworks.keras.backends import BACKENDS
from duoka.frameworks.keras.capture import FRAMEWORK
from duoka.frameworks.keras.compiler_choice import watch_choice
from duoka.frameworks.keras.kept import Kept
from duoka.frameworks.keras.newcomers import Newcomers
from duoka.frameworks.keras.refusals import (
    refuse_fit_without_callbacks,
    refuse_other_distributions,
    refuse_own_functions,
)
from duoka.frameworks.keras.scope import is_training_now, watch_models
from duoka.frameworks.keras.shared_reading import SharedReading
from duoka.frameworks.keras.step_placement import log_plain_fit_placement
from duoka.frameworks.keras.steps import Progress
from duoka.frameworks.keras.trainings import Trainings
from duoka.frameworks.placement_log import make_placement_log
from duoka.frameworks.telling import Telling
from duoka.frameworks.unseen import refuse_unseen
from duoka.strategies.strategy import Options

_TRIED = "3.15."  # other versions may work: a good part of what is hooked into is not public


class NoEvaluation:
    """`evaluate` and `predict` are the model's own."""

    replicas_of_last_loop: tuple[int, ...] | None = None

    def refuse(self, call: str) -> None:
        pass


class PlainTensors:
    """Tensors go through NumPy, and stay arrays."""

    def on_host(self, value: Any) -> Any:
        return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value

    def read(self, value: Any) -> None:
        return None

    def make(self, kind: str, bits: Any, like: Any) -> Any:
        return bits


class KerasAdapter:
    is_known_when_prepared = False  # it may be that fit trains, or a loop of the user's own

    def __init__(self, collective: Collective, device: Device, options: Options | None = None) -> None:
        self._collective = collective
        self.options = options or Options()
        self._memory = Memory(collective, "fit")
        self._deeds = Deeds(collective)
        self._readings: Kept[SharedReading] = Kept()  # of streams, by any of the models
        self._progress = Progress()
        self.tell_once = Telling(collective).tell_once
        self._placement_log = make_placement_log(collective, device, self.options)
        self.checks = Checks(collective, self.options.check_every, self.tell_once)
        self.evaluation = NoEvaluation()
        self.epochs = Epochs()
        self.tensors = PlainTensors()
        newcomers = Newcomers(collective.joining, self, self.options.borders)
        self._trainings = Trainings(
            self, self._progress, self.options.borders, newcomers, self.tell_once, self._is_main
        )
        self._plain: list[weakref.ref[Any]] = []  # models with one replica
        self.options.borders.when_state_is_wanted(self._attach_plain)

    def _is_main(self) -> bool:
        return self._collective.worker == self._collective.main

    def prepare(self, objects: Sequence[Any], *, is_sharded: bool = False) -> list[Any]:
        for thing in objects:
            if not isinstance(thing, keras.Model):
                raise MismatchError(
                    f"A {type(thing).__name__} cannot be prepared beside Keras models.",
                    do="prepare the model; its optimizer and the data go with it.",
                )
            self.attach(thing)
        return list(objects)

    def attach(self, model: Any) -> None:
        """Once for each model. With one replica it stays as it is, until there are checkpoints."""
        if is_attached(model):
            return
        if self._collective.num_replicas == 1:
            if self._placement_log is not None:
                log_plain_fit_placement(self._placement_log, model)
            if not any(known() is model for known in self._plain):
                self._plain.append(weakref.ref(model))
            if self.options.borders.is_state_wanted:
                self._attach_plain()
            return
        self._check(model)
        Attachment(
            model,
            self._collective,
            self._memory,
            self._progress,
            self.tell_once,
            sync_batchnorm=self.options.sync_batchnorm,
            share_reading=self.options.share_reading,
            placement_log=self._placement_log,
            readings=self._readings,
            deeds=self._deeds,
            checks=self.checks,
            trainings=self._trainings,
        ).attach()
        if keras.backend.backend() == "tensorflow":  # where updates are compiled that nobody asked to compile
            watch_choice(model)

    def _attach_plain(self) -> None:
        models, self._plain = [known() for known in self._plain], []
        for model in models:
            if model is not None:
                LoneModel(model, self._progress, self._trainings, self.tell_once).attach()

    def _check(self, model: Any) -> None:
        if (name := keras.backend.backend()) not in BACKENDS:
            raise MismatchError(f"Keras runs on {name}.", do=f"set KERAS_BACKEND to one of {', '.join(BACKENDS)}.")
        if is_training_now(model):
            raise MismatchError(
                f"The fit of {model.name} is under way, and it is to train on all replicas from here on.",
                why="the batches before were trained by every worker for itself.",
                do="make the strategy before fit, and build the model inside `with strategy.scope():`, or prepare it.",
            )
        refuse_own_functions(model)
        refuse_fit_without_callbacks(model)
        refuse_other_distributions(model)
        if not keras.__version__.startswith(_TRIED):
            self.tell_once(f"Keras {keras.__version__} has not been tried with Duoka; {_TRIED[:-1]} has")

    @contextmanager
    def scope(self, owner: Any) -> Iterator[None]:
        with watch_models(owner, self.attach):
            yield

    # What the strategy asks.

    @property
    def step(self) -> int:
        return self._progress.step

    @property
    def batch(self) -> int:
        return self._progress.step

    @property
    def position(self) -> tuple[int, int] | None:
        return None if self._progress.rows is None else (self._progress.step, self._progress.rows)

    num_samples = None

    def refuse_number(self, call: str) -> None:
        return

    def come_to_end(self) -> None:
        """A fit is over when the script ends."""

    def capture(self) -> dict[str, Any]:
        return {
            "framework": FRAMEWORK,
            "backend": keras.backend.backend(),
            "step": self.step,
            "batch": self.batch,
            "bodies": self._progress.batch,
            "agreed_step": self.checks.agreed_step,
            "rooms": list(self._memory.rooms),
            **self._trainings.capture(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """What a script has trained until then is left out; models get their variables when it is there."""
        here, saved = (FRAMEWORK, keras.backend.backend()), (state.get("framework"), state.get("backend"))
        if here != saved:
            raise CheckpointError(
                f"The saved state is one of {' on '.join(filter(None, saved))}, and this run is {' on '.join(here)}.",
                do="use another directory.",
            )
        self._progress.step, self._progress.batch = state["step"], state["bodies"]
        agreed_step = state.get("agreed_step")  # None: never compared, but from here on all have this state
        self.checks.agreed_step = state["step"] if agreed_step is None else agreed_step
        if self._trainings.newcomers.is_newcomer:
            self._memory.make_same_rooms(state["rooms"])
        self._trainings.resume(state)

    @property
    def is_repeating(self) -> bool:
        return self._trainings.is_repeating

    def come_to_save(self) -> bool:
        return self._trainings.come_to_save()

    def weigh(self, loss: Any, count: Any) -> Any:
        return loss

    def evaluate(self, function: Any, loader: Any) -> Any:
        raise MismatchError("strategy.evaluate is for PyTorch loaders.", do="call model.evaluate.")


_made: list[weakref.ref[KerasAdapter]] = []


def make_adapter(collective: Collective, seed: int, device: Device, options: Options) -> KerasAdapter:
    refuse_unseen(keras.backend.backend(), device)
    adapter = KerasAdapter(collective, device, options)
    _made.append(weakref.ref(adapter))
    if collective.joining is not None and len(_made) > 1:
        collective.joining.refuse("it trains with more than one strategy, and the state of one is not that of all")
    return adapter
