"""The whole state of a TensorFlow loop at a border between steps, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.python.eager import context

from duoka.data import generators
from duoka.data.position import Epochs, Saves, stretch_after, stretch_in
from duoka.data.trail import Place, Trail
from duoka.errors import CheckpointError
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.tensorflow.loader import Source
from duoka.frameworks.tensorflow.roster import Roster
from duoka.frameworks.tensorflow.state import Trained
from duoka.frameworks.tensorflow.turns import Progress
from duoka.strategies.also import Also

FRAMEWORK = "tensorflow"


class Capture:
    """Takes a run's state apart, and puts it together again."""

    def __init__(
        self,
        progress: Progress,
        checks: Checks,
        agreed: dict[int, Any],
        epochs: Epochs,
        trained: Trained,
        tell: Callable[[str], None],
        also: Also,
    ) -> None:
        self._progress, self._checks, self.epochs, self._trained = progress, checks, epochs, trained
        self._agreed = agreed  # variables that are known to be the same on all workers
        self._agreed_names: set[str] = set()
        self.roster = Roster(self._note_agreed)
        trained.names = self.roster
        self._also, self._tell = also, tell
        self.trail = Trail(self._describe, self._take, capture_generators, lambda: self.is_led, tell)
        self.saves = Saves(tell)
        self.batch = 0  # handed out by whoever led a loop
        self.sources: list[Source] = []
        self._stretch = 0  # of the script: see Passes
        self._num_added = 0  # datasets that the script has distributed, those of epochs that are left out included
        self._is_at_end_of_epochs = False  # the state that was restored, if its last loop over epochs was over
        self._positions: dict[int, dict[str, Any]] = {}  # of datasets that are still to be distributed
        self._numbers: list[int] = []  # of `sources`
        self._epoch_start: dict[str, Any] = {"datasets": 0, "generators": None}  # or the end of the last loop over them
        self._arrive: Callable[[], None] | None = None

    @property
    def step(self) -> int:
        return self._progress.step

    def add_source(self) -> Source:
        """One that is distributed after a state was restored has its position in it."""
        source = Source()
        self.sources.append(source)
        self._numbers.append(self._num_added)
        source.passes.begin_stretch(self._stretch)
        if self._num_added in self._positions:
            source.resume(self._positions.pop(self._num_added))
        self._num_added += 1
        return source

    def begin_epoch(self, is_resumed: bool) -> None:
        self.saves.begin_epoch()
        self.trail.begin_epoch(is_resumed)
        self._begin_stretch(stretch_in(self.epochs.num_calls))
        if is_resumed:
            for source in self.sources:
                source.passes.begin_resumed_epoch()
            self._num_added = max(self._num_added, int(self._epoch_start["datasets"]))
            if self._epoch_start["generators"] is not None:
                restore_generators(self._epoch_start["generators"])  # for what is drawn up to the batch that is next
        else:
            for source in self.sources:
                source.passes.begin_epoch()
            self._epoch_start = {"datasets": self._num_added, "generators": capture_generators()}

    def end_epochs(self) -> None:
        self.saves.end_epochs(self.epochs.num_calls, self.epochs.epoch)
        if not self.saves.is_awaited:
            self.arrive()
        self.saves.begin_epoch()
        for source in self.sources:
            source.passes.begin_epoch()
        self._epoch_start = {"datasets": self._num_added, "generators": None}

    def end_stretch(self) -> None:
        """A loop over epochs has ended, was left, or was over when the run was saved."""
        self.trail.end_epochs(self.epochs.num_calls)
        self._begin_stretch(stretch_after(self.epochs.num_calls))

    def _begin_stretch(self, stretch: int) -> None:
        self._stretch = stretch
        for source in self.sources:
            source.passes.begin_stretch(stretch)

    @property
    def is_repeating(self) -> bool:
        return self.is_led and not self.trail.is_at_top

    @property
    def is_led(self) -> bool:
        """A state was restored, and the script runs from its top: until the next batch, what it does has happened."""
        return self._arrive is not None

    def come_to_save(self) -> bool:
        if self.saves.come_by(self.epochs.num_calls, self.epochs.epoch):
            self.arrive()
        return not self.is_led

    def leave_out(self, goes_on: bool) -> bool:
        """The script has left out the last loop over epochs. Says whether the run was saved there, and not later."""
        is_here = self._is_at_end_of_epochs
        if is_here and (goes_on or not self.saves.is_awaited):
            self.arrive()
        self.saves.begin_epoch()
        num_datasets = int(self._epoch_start["datasets"])
        self._num_added = max(self._num_added, num_datasets)
        if is_here:
            self._positions = {n: position for n, position in self._positions.items() if n < num_datasets}
        for source in self.sources:
            # An evaluation after the loop runs again: with more epochs it is another one, else it is the same.
            source.passes.start_at_epoch() if is_here else source.passes.begin_resumed_epoch()
        return is_here

    # What newcomers are told before they are given the rest.

    def number_of(self, source: Source) -> int:
        return next(n for n, other in zip(self._numbers, self.sources, strict=True) if other is source)

    def describe_epoch(self) -> dict[str, Any]:
        """Where the epoch under way began, as JSON has it."""
        positions = {str(n): source.capture() for n, source in zip(self._numbers, self.sources, strict=True)}
        return {"start": generators.as_plain(self._epoch_start), "positions": positions}

    def resume_epoch(self, start: dict[str, Any], positions: dict[str, Any]) -> None:
        self._epoch_start = generators.from_plain(start)
        for number, source in zip(self._numbers, self.sources, strict=True):
            if str(number) in positions:
                source.resume(positions.pop(str(number)))
        self._positions = {int(number): position for number, position in positions.items()}
        self._num_added = max(self._num_added, int(self._epoch_start["datasets"]))

    def count(self, step: int, batch: int) -> None:
        self._progress.step, self.batch = step, batch

    # Places between loops.

    def _describe(self, largest_bytes: int) -> Place:
        also, is_whole = self._also.look(largest_bytes)
        return Place([self.step, self.batch], also, capture_generators(), is_whole)

    def _take(self, place: Place) -> None:
        self.count(*place.counts)
        self._also.take(place.also)
        if place.generators is not None:
            restore_generators(place.generators)

    # All of it.

    def capture(self) -> dict[str, Any]:
        agreed = [name for variable in self._agreed.values() if (name := self.roster.name_of(variable))]
        positions = {n: source.capture() for n, source in zip(self._numbers, self.sources, strict=True)}
        positions |= self._positions
        return self.roster.capture() | {
            "framework": FRAMEWORK,
            "agreed": sorted({*agreed, *self._agreed_names}),
            "agreed_step": self._checks.agreed_step,
            "trained": self._trained.capture(),
            "optimizers": self._trained.list_classes(),
            "step": self.step,
            "batch": self.batch,
            "epoch": self.epochs.epoch or max((each["passes"] for each in positions.values()), default=0),
            "epochs": self.epochs.capture(),
            "epoch_start": self._epoch_start,
            "datasets": sorted(positions),
            "position": [positions[number] for number in sorted(positions)],
            "generators": capture_generators(),
            "save": self.saves.last,
            "trail": self.trail.capture(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """All of it is checked before anything is changed."""
        if state.get("framework") != FRAMEWORK:
            raise CheckpointError(
                f"The saved state is one of {state.get('framework')}, and this run trains in a TensorFlow loop.",
                do="use another directory.",
            )
        self.roster.check(state)
        self._agreed_names = set(state["agreed"])
        agreed_step = state["agreed_step"]  # None: never compared, but from here on all have this state
        self._checks.agreed_step = state["step"] if agreed_step is None else agreed_step
        self._trained.restore(state["trained"], state["optimizers"])
        self.trail.restore(state["trail"])
        for line in self.roster.name_changes(state):
            self._tell(line)
        self._restore_variables(state)
        self._restore_position(state)

    def _restore_variables(self, state: dict[str, Any]) -> None:
        for variable in self.roster.restore(state):
            self._note_agreed(variable)

    def _note_agreed(self, variable: Any) -> None:
        if self.roster.name_of(variable) in self._agreed_names:
            self._agreed[id(variable)] = variable

    def _restore_position(self, state: dict[str, Any]) -> None:
        here = {n: source.passes.where for n, source in zip(self._numbers, self.sources, strict=True)}
        self.epochs.resume(state["epochs"])
        self._epoch_start = state["epoch_start"]
        self._is_at_end_of_epochs = all(each["is_at_epoch"] or not each["trains"] for each in state["position"])
        positions = dict(zip(state["datasets"], state["position"], strict=True))
        for number, source in zip(self._numbers, self.sources, strict=True):
            if number in positions:
                source.resume(positions[number])
        self._positions = {n: position for n, position in positions.items() if n not in here}

        self.saves.resume(state["save"])

        def arrive() -> None:
            self._also.arrive()
            self.trail.arrive(state["trail"])
            self.count(state["step"], state["batch"])
            self._restore_variables(state)  # the script may have changed some on its way here
            restore_generators(state["generators"])

        saved = {n: (each["passes"], each["batches"], each["is_open"]) for n, each in positions.items()}
        if not self.saves.is_awaited and (saved == here or not any(map(any, saved.values()))):
            arrive()  # it is here, or nothing has happened before it
        else:
            self._also.begin_at_top()
            self._arrive = arrive

    def arrive(self) -> None:
        """The script has come to where the run is."""
        if self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            arrive()


def capture_generators() -> dict[str, Any]:
    """Also the one that gives a seed to each operation of tf.random outside of graphs, and to each shuffling."""
    source = getattr(context.context(), "_rng", None)
    seeds = None if source is None else generators.capture_python(source)
    return generators.capture_generators() | {"operations": seeds}


def restore_generators(state: dict[str, Any]) -> None:
    generators.restore_generators(state)
    source = getattr(context.context(), "_rng", None)
    if source is not None and state["operations"] is not None:
        generators.restore_python(source, state["operations"])
        context.context().clear_kernel_cache()  # kernels with the same seed would go on where they are
