"""Ties a Keras model to a run: `fit` finds other functions on it. They are attributes of the instance, never saved."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import keras

from duoka.collectives.collective import Collective
from duoka.collectives.deeds import Deeds
from duoka.frameworks.exchange.agreement import hear_all
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.exchange.memory import Memory
from duoka.frameworks.few_rows import say_few_rows
from duoka.frameworks.keras.backend import Backend
from duoka.frameworks.keras.backends import load_backend, load_restarting
from duoka.frameworks.keras.callbacks import make_bar, writing_once
from duoka.frameworks.keras.course import Course
from duoka.frameworks.keras.data import leaves_of
from duoka.frameworks.keras.equality import Equality
from duoka.frameworks.keras.generators import AT_THE_START, digest, take_states_from_first
from duoka.frameworks.keras.kept import Kept
from duoka.frameworks.keras.reading import make_reading, skip, some
from duoka.frameworks.keras.refusals import refuse_stateful_layers
from duoka.frameworks.keras.saving import save_once
from duoka.frameworks.keras.seeds_of_replicas import seed_variables
from duoka.frameworks.keras.shared_reading import SharedReading
from duoka.frameworks.keras.source import naming, settle, source_of
from duoka.frameworks.keras.start import agree_on_start
from duoka.frameworks.keras.state import KerasState
from duoka.frameworks.keras.step_placement import log_fit_placement
from duoka.frameworks.keras.steps import Progress, Steps
from duoka.frameworks.keras.terms import Terms
from duoka.frameworks.keras.trainings import Trainings
from duoka.frameworks.keras.votes import BatchVote, EpochVote, watch_batches
from duoka.frameworks.keras.whole_share import WholeShareSteps
from duoka.frameworks.placement_log import PlacementLog
from duoka.frameworks.switching import keeping_switches
from duoka.strategies.checkpoints import missing

_SHADOWED = (
    "make_train_function",
    "make_test_function",
    "fit",
    "evaluate",
    "predict",
    "test_on_batch",
    "predict_on_batch",
)


class Attachment:
    """One model of a run.

    Training is shared between replicas, and so is the validation that belongs to `fit`. Any other `evaluate`, and
    `predict`, is this worker's own business: it may be called by one worker alone, and waits for nobody.
    """

    def __init__(
        self,
        model: Any,
        collective: Collective,
        memory: Memory,
        progress: Progress,
        tell: Callable[[str], None],
        *,
        sync_batchnorm: bool = False,
        share_reading: bool | None = None,
        readings: Kept[SharedReading],
        deeds: Deeds,
        checks: Checks,
        trainings: Trainings,
        placement_log: PlacementLog | None = None,
    ) -> None:
        self._model, self._collective = model, collective
        self._memory, self._progress, self._tell = memory, progress, tell
        self._is_fitting = False
        self._placement_log = placement_log
        self._sync_batchnorm, self._share_reading, self._readings = sync_batchnorm, share_reading, readings
        self._is_validating = False
        self._has_agreed = False  # on the values of variables, at the start of a training
        self._has_counted = False  # the rows of the first batch of a fit: the last one of an epoch may have few
        self._checks, self._trainings, self._deeds = checks, trainings, deeds
        self._equality = Equality(model, collective, self._check)
        self._own_test_function: Any = None  # this worker's
        self._shared_test_function: Any = None

    def attach(self) -> None:
        attributes, kind = self._model.__dict__, type(self._model)
        for name in _SHADOWED:
            attributes[name] = getattr(self, name)
        for name in ("save", "save_weights", "export"):
            own = getattr(kind, name).__get__(self._model)
            attributes[name] = save_once(own, self._deeds, self._has_saved, makes_folders=name == "export")
        self._model.train_function = self._model.test_function = None  # of trainings before

    def _has_saved(self, path: Any) -> bool:
        """A script that is resumed comes by what it has saved before, with the weights of later."""
        if not self._trainings.is_repeating:
            return False
        if not os.path.exists(path):
            self._tell(missing(path))
        return True

    def make_train_function(self, force: bool = False) -> Any:
        """What `fit` and `train_on_batch` call before they train."""
        is_new = self._model.train_function is None or force
        self._has_agreed = self._has_agreed and not is_new
        if keras.backend.backend() != "tensorflow":
            # Here everything is built; on JAX the variables are empty while `fit` runs.
            self._agree()
        if is_new:
            self._model.train_function = self._make_function(is_training=True)
        return self._model.train_function

    def make_test_function(self, force: bool = False) -> Any:
        model = self._model
        if self._is_validating and self._trainings.is_led:
            model.test_function = make_reading(model.steps_per_execution)
            return model.test_function
        if model.test_function is None or force:  # compiled anew
            self._own_test_function = self._shared_test_function = None
        if self._is_validating:
            self._shared_test_function = self._shared_test_function or self._make_function(is_training=False)
            model.test_function = self._shared_test_function
        else:
            model.test_function = self._own_test_function
            type(model).make_test_function(model)
            self._own_test_function = model.test_function
        return model.test_function

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Callbacks write on the main worker only, and behind the user's comes one of ours: any stop stops all."""
        arguments = self._by_name("fit", args, kwargs)
        x = arguments.get("x")
        given: Any = arguments.get("callbacks")
        is_list = isinstance(given, keras.callbacks.CallbackList)
        callbacks = list(given.callbacks) if is_list else keras.tree.flatten(given or [])
        more = self._bar(callbacks, arguments)
        if len(self._collective.workers) > 1 or self._collective.joining is not None:
            more.append(self._start_together(x, callbacks))
        self._has_agreed = self._has_counted = False
        if is_list:
            given.callbacks.extend(more)
        else:
            arguments["callbacks"] = [*callbacks, *more]
        self._is_fitting = True
        try:
            reading = self._reading_of(x)
            arguments = {name: settle(argument, self._tell) for name, argument in arguments.items()}
            sharing: AbstractContextManager[None] = nullcontext()
            if reading is not None:
                sharing = reading.watching(arguments.get("x"))
            with naming(x), writing_once([*callbacks, *more], self._is_main), sharing, keeping_switches():
                return self._trainings.run(
                    self._model,
                    (x, arguments.get("validation_data")),
                    lambda: type(self._model).fit(self._model, **arguments),
                    num_epochs=int(arguments.get("epochs", 1)),
                    has_own_steps=arguments.get("steps_per_epoch") is not None,
                    reading=reading,
                )
        finally:
            self._is_fitting = False
            if is_list:
                given.callbacks[:] = callbacks

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """`fit` says with an argument of its own that it is the one who calls; it does so on all workers."""
        if not kwargs.get("_use_cached_eval_dataset"):
            if self._is_fitting:
                return self._run_alone("evaluate", args, kwargs)
            return self._trainings.evaluate(lambda: self._run_alone("evaluate", args, kwargs))
        if self._trainings.reads_nothing:
            return {}
        self._is_validating = True
        try:
            with naming(kwargs.get("x", args[0] if args else None)):
                return type(self._model).evaluate(self._model, *args, **kwargs)
        finally:
            self._is_validating = False

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_alone("predict", args, kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_alone("test_on_batch", args, kwargs)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_alone("predict_on_batch", args, kwargs)

    def _run_alone(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """With one progress bar, even when all workers do it; and in the middle of `fit` without a trace."""
        arguments = self._by_name(name, args, kwargs)
        self._trainings.refuse_unknown_weights(name, self._model)
        if name in ("evaluate", "predict") and not self._is_main():
            arguments["verbose"] = 0
        keeping: AbstractContextManager[None] = self._keeping_state() if self._is_fitting else nullcontext()
        with keeping:
            return getattr(type(self._model), name)(self._model, **arguments)

    @contextmanager
    def _keeping_state(self) -> Iterator[None]:
        """Metrics go on counting where they were: otherwise `History` would differ between workers."""
        model = self._model
        if keras.backend.backend() == "jax":
            model.jax_state_sync()
        variables = [*model.metrics_variables, *seed_variables(model)]
        values = [keras.ops.copy(variable.value) for variable in variables]
        try:
            yield
        finally:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _start_together(self, x: Any, callbacks: list[Any]) -> EpochVote:
        """All workers are here, with the same generators. What one of them has written before, the others find.

        Callbacks may differ: one that watches batches on any worker makes all of them vote after each batch.
        """
        if (source := source_of(x)).is_stream:
            self._tell(f"every worker reads all of {source.name}, and trains on its rows")
        note = bytes([watch_batches(callbacks)]) + digest(AT_THE_START)
        notes = hear_all(self._collective, note, "at the start of fit")
        if len({note[1:] for note in notes}) > 1:
            take_states_from_first(self._collective, AT_THE_START)
        kind = BatchVote if any(note[0] for note in notes) else EpochVote
        return kind(self._model, self._collective, self._equality)

    def _reading_of(self, x: Any) -> SharedReading | None:
        """Where it is not asked for, only what can be seen to come to no harm is read by one worker for all."""
        source = source_of(x)
        is_alone = len(self._collective.workers) == 1 and self._collective.joining is None and x not in self._readings
        if self._share_reading is False or is_alone or not source.is_stream:
            return None
        restarting: Any = load_restarting() if source.is_tensorflow else None
        restarts = restarting is not None and restarting.restarts(x)
        if not restarts and not self._share_reading:
            return None
        prepare = None if restarting is None else restarting.with_own_threads

        def make() -> SharedReading:
            return SharedReading(
                self._collective,
                self._memory,
                source,
                self._tell,
                restarts=restarts,
                prepare=prepare,
                is_led=lambda: self._trainings.is_led,
            )

        return self._readings.of(x, make)

    def _bar(self, callbacks: list[Any], arguments: dict[str, Any]) -> list[Any]:
        has_bar = any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in callbacks)
        is_list = isinstance(arguments.get("callbacks"), keras.callbacks.CallbackList)
        return [make_bar()] if arguments.get("verbose", "auto") != 0 and not has_bar and not is_list else []

    def _by_name(self, name: str, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name: those of the model's own method, and of Keras's where that takes any (`*args`)."""
        own = list(inspect.signature(getattr(type(self._model), name)).parameters.values())[1:]
        names = [each.name for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
        if any(each.kind is each.VAR_POSITIONAL for each in own):
            names += list(inspect.signature(getattr(keras.Model, name)).parameters)[1 + len(names) :]
        if len(args) > len(names):
            raise TypeError(f"{name}() takes at most {len(names)} arguments, and was given {len(args)}")
        return dict(zip(names, args, strict=False)) | kwargs

    def _is_main(self) -> bool:
        return self._collective.worker == self._collective.main

    def _make_function(self, *, is_training: bool) -> Any:
        """With the arguments and results that this backend's `fit` expects."""
        name = keras.backend.backend()
        terms = Terms()
        backend: Backend = load_backend()(self._model, terms, self._tell, is_training=is_training)
        steps = Steps(
            self._collective, self._memory, backend, terms, self._progress, self._tell, is_training=is_training
        )

        def make_whole(reason: str) -> WholeShareSteps:
            self._trainings.newcomers.refuse("its steps exchange in their middle")
            return WholeShareSteps(
                self._model,
                self._collective,
                self._progress,
                self._tell,
                reason=reason,
                sync_batchnorm=self._sync_batchnorm,
            )

        reason = "sync_batchnorm=True" if self._sync_batchnorm and is_training else None
        course = Course(self._model, steps, backend, make_whole, reason)
        log = self._placement_log if is_training else None
        num_batches = self._model.steps_per_execution

        def run(batches: Any) -> dict[str, Any]:
            return run_with_state(None, batches)[0]

        def run_with_state(state: Any, batches: Any) -> tuple[dict[str, Any], Any]:
            first = self._build(next(batches))
            if is_training:
                self._count_rows(first)
                is_over, state = self._trainings.meet(self._model, first, state, self._keep_equal)
            if is_training and is_over:
                skip(batches, num_batches - 1)
                return self._trainings.logs_of_before(self._model), state
            with log_fit_placement(log, self._model, lambda: backend.programs, lambda: course.state):
                logs = course.run(first, state)
            for batch in some(batches, num_batches - 1):
                logs = course.run(batch, self._keep_equal(course.state) if is_training else course.state)
            if is_training:
                self._trainings.note_logs(self._model, logs)
                self._equality.see_batch(course.state, self._trainings.num_fitted(self._model))
            return logs, course.state

        if name == "jax":
            return run_with_state
        return (lambda batches: run(iter(batches))) if name == "torch" else run

    def _keep_equal(self, state: Any) -> Any:
        """Between two steps: compare replicas when it is time. Returns the state."""
        self._checks.at_border(self._progress.step, lambda: KerasState(self._model, state))
        return state

    def _check(self) -> None:
        """Outside of a batch, where variables have their values."""
        self._checks.check(self._progress.step, KerasState(self._model))

    def _build(self, batch: Any) -> Any:
        """On TensorFlow it is the first batch that shows the shapes: from here on all variables exist."""
        if not self._has_agreed:
            with suppress(RuntimeError):  # a model without `call` is built by its train_step
                self._model._symbolic_build(data_batch=batch)
            self._agree()
        return batch

    def _count_rows(self, batch: Any) -> None:
        """Also of a batch that is left out: a script that is resumed may go on with a last one."""
        num_rows = max((int(leaf.shape[0]) for leaf in leaves_of(batch)), default=0)
        if not self._has_counted and num_rows and (line := say_few_rows(num_rows, self._collective.num_replicas)):
            self._tell(line)
        self._has_counted = True

    def _agree(self) -> None:
        if not self._has_agreed:
            refuse_stateful_layers(self._model)
            if not self._trainings.is_led:  # otherwise all have been given the same, or will be
                agree_on_start(self._model, self._collective)
            self._equality.begin()
            self._has_agreed = True


def is_attached(model: Any) -> bool:
    return _SHADOWED[0] in model.__dict__
