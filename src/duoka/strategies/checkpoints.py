"""The checkpoints of a run: when they are taken, what they say, and how a run goes on from one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from duoka.checkpoint.reading import Found
from duoka.checkpoint.store import Store
from duoka.checkpoint.writer import BackgroundWriter
from duoka.errors import CheckpointError
from duoka.strategies.rhythm import Rhythm
from duoka.strategies.stopping import StopSign
from duoka.strategies.strategy import Restorable, Session
from duoka.strategies.turn import Turn

TERMINATED = 143  # the exit code of what SIGTERM ends
_DEADLINE_S = 1800.0
_DEADLINE_ON_ERROR_S = 60.0


class Checkpoints:
    """Saves at borders between steps, on the main worker; the role moves when that one is lost.

    As a context manager it saves once more at the end of its block, unless the block ends with an error.
    """

    def __init__(
        self,
        session: Session,
        store: Store,
        rhythm: Rhythm,
        also: Mapping[str, Any],
        flags: Mapping[str, Any],
        is_main: Callable[[], bool],
    ) -> None:
        self._session, self._store, self._rhythm = session, store, rhythm
        self._training: Restorable | None = None  # what is saved, once it is known
        self._found: tuple[Found, float] | None = None  # to go on from, and since when it was looked for
        self._also, self._flags, self._is_main = dict(also), dict(flags), is_main
        session.borders.also.update(also)
        self._stop_sign = StopSign(session.collective, is_main, session.listen_for_termination())
        self._writer: BackgroundWriter | None = None
        self._stalls: list[float] = []
        self._first_step = 0  # of this process
        self._saved = (-1, -1)  # step and batch of the state that was saved, or resumed, last
        self.resumed_step: int | None = None  # what this run went on from
        session.at_exit(self._tell_if_unused)

    # Going on from one.

    def find(self) -> None:
        """The newest verified one, if there is any: one worker chooses, all of them read it."""
        begin = time.monotonic()
        self._session.keep_checkpoints(self._store.directory, resumes=True)
        turn = Turn(self._session.collective, "strategy.checkpoint", _DEADLINE_S)
        found: Found | None = None
        if turn.is_mine():
            with turn.acting():
                found = self._store.newest(self._session.list_codecs())
                turn.word = b"" if found is None else found.name.encode()
        elif turn.word and not self._session.is_newcomer:  # who joins a run is given its state
            found = self._store.load(turn.word.decode(), self._session.list_codecs())
        if found is not None:
            _compare_runs(found, self._facts())
            self._found = found, begin

    def begin(self, training: Restorable) -> None:
        """It is known what is trained: it goes on from what was found."""
        self._training = training
        if self._found is not None:
            self._take(training, *self._found)
            self._found = None  # and its memory
        self._first_step = training.step
        self._rhythm.begin(training.step)

    def _take(self, training: Restorable, found: Found, begin: float) -> None:
        training.restore(found.state["run"])
        for name, thing in self._also.items():
            if name in found.state["also"]:
                thing.load_state_dict(found.state["also"][name])
        self.resumed_step = found.step
        self._saved = found.step, found.facts["batch"]
        if self._is_main():
            seconds = time.monotonic() - begin
            self._session.say(f"resumed from {found.path}: {_describe(found.facts)} ({seconds:.1f} s)")
            if changed := _list_changes(found.facts["fingerprint"], self._facts()["fingerprint"]):
                self._session.say(f"not the same bits are promised as where it was saved: {'; '.join(changed)}")

    def set_aside(self) -> None:
        """A new run in a directory with checkpoints: they are kept, where they cannot be taken for this run's."""
        self._session.keep_checkpoints(self._store.directory, resumes=False)
        turn = Turn(self._session.collective, "strategy.checkpoint", _DEADLINE_S)
        if turn.is_mine():
            with turn.acting():
                folder = self._store.set_aside()
                if folder is not None:
                    self._session.say(f"resume=False: older checkpoints were moved to {folder}")

    # Saving.

    def at_start(self, training: Restorable) -> None:
        """One thing is trained in a run with checkpoints: the state of another one would not be in them."""
        if self._training is None:
            self.begin(training)
        if training is not self._training:
            raise CheckpointError(
                "This run trains in two ways, and its checkpoints hold the state of the first.",
                why="fit and loops of your own were mixed, or PyTorch and TensorFlow.",
                do="train with one of them, or leave strategy.checkpoint out.",
            )

    def at_border(self, training: Restorable) -> None:
        self.at_start(training)
        if self._stop_sign.is_here(training.batch):
            self._stop(training)
        if self._rhythm.is_due(training.step) and self._is_main():
            self._save(training)
        elif self._writer is None and training.step > self._first_step and self._is_main():
            self._writing().reserve(self._collect(training))  # after a step: optimizers have no state before it

    def at_end(self, training: Restorable) -> None:
        if self._is_main():
            self._save(training)
        if self._stop_sign.is_here(training.batch):
            self._stop(training)

    def save(self) -> None:
        """Save now: outside of loops, on all workers alike. It is on the disk when this returns."""
        if self._training is None:
            raise CheckpointError("There is nothing to save yet.", do="call it when training has begun.")
        if self._is_main():
            self._save(self._training)
            self.wait()

    def _save(self, training: Restorable) -> None:
        here = training.step, training.batch
        if here == self._saved:
            return
        state = self._collect(training)
        self._stalls.append(self._writing().submit(training.step, self._facts(state["run"]), state))
        self._saved = here

    def _collect(self, training: Restorable) -> dict[str, Any]:
        return {"run": training.capture(), "also": {name: x.state_dict() for name, x in self._also.items()}}

    def _writing(self) -> BackgroundWriter:
        if self._writer is None:
            self._session.at_exit(self._summarise)  # after the writer, which comes to its end first
            self._writer = BackgroundWriter(self._store, self._session.list_codecs())
        return self._writer

    def wait(self, deadline_s: float = _DEADLINE_S) -> None:
        """Until what was saved is on the disk."""
        if self._writer is not None:
            self._writer.wait(deadline_s)

    def _stop(self, training: Restorable) -> None:
        """The run was asked to end: save, and end it. Should the one that saves be lost, another one does it."""
        self._session.say_that_it_ends()
        turn = Turn(self._session.collective, "the last checkpoint", _DEADLINE_S)
        if turn.is_mine():
            with turn.acting():
                self._save(training)
                self.wait()
                self._session.say(f"SIGTERM: step {training.step} is saved in {self._store.directory}")
        raise SystemExit(TERMINATED)

    def _facts(self, state: dict[str, Any] | None = None) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "seed": self._session.seed,
            "replicas": self._session.num_replicas,
            "fingerprint": self._session.fingerprint() | {name: str(flag) for name, flag in self._flags.items()},
        }
        if state is not None:
            facts |= {name: state[name] for name in ("framework", "step", "batch", "epoch", "position")}
            facts |= {"workers": self._session.num_workers, "agreed_step": state.get("agreed_step")}
        return facts

    def _tell_if_unused(self) -> None:
        if self._training is None and self._is_main():
            self._session.say(
                f"nothing was saved in {self._store.directory}: no loop over a prepared loader, or over"
                " strategy.distribute_dataset, and no fit in strategy.scope() has begun"
            )

    def _summarise(self) -> None:
        stalls = [stall * 1000 for stall in self._stalls]
        if not stalls:
            return
        count = f"{len(stalls)} checkpoint{'s' if len(stalls) > 1 else ''}"
        held_up = f"{statistics.median(stalls):.1f} ms (median), {max(stalls):.1f} ms at most"
        failure = "" if self._writer is None or self._writer.failure is None else "; the last one was NOT saved"
        self._session.say(f"{count} in {self._store.directory}, training held up for {held_up}{failure}")

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None and self._training is not None:
            self.save()
        else:
            self.wait(_DEADLINE_ON_ERROR_S)


def _compare_runs(found: Found, facts: dict[str, Any]) -> None:
    """The same R and the same seed, or it would be another run."""
    for name, why in (
        ("replicas", "with another number of replicas the sums are added up differently"),
        ("seed", "with another seed the data come in another order"),
    ):
        if found.facts[name] != facts[name]:
            raise CheckpointError(
                f"{found.path} is of a run with {name}={found.facts[name]}; this one has {name}={facts[name]}.",
                why=f"{why}: it would not be the same run any more.",
                do=f"use {name}={found.facts[name]}, another directory, or resume=False for a new run.",
            )


def _list_changes(saved: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    names = sorted({*saved, *here})
    return [f"{n} was {saved.get(n)}, is {here.get(n)}" for n in names if saved.get(n) != here.get(n)]


def _describe(facts: Mapping[str, Any]) -> str:
    """Where the run goes on.

    >>> _describe({"step": 120, "epoch": 3, "position": [{"passes": 3, "batches": 24}]})
    'step 120, epoch 3, batch 24'
    """
    batches = [place["batches"] for place in facts["position"] if place["batches"]]
    return f"step {facts['step']}, epoch {facts['epoch']}, batch {batches[0] if batches else 0}"
