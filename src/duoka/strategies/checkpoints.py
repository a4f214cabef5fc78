"""The checkpoints of a run: when they are taken, what they say, and how a run goes on from one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from duoka.checkpoint.reading import Found
from duoka.checkpoint.store import Store
from duoka.checkpoint.writer import BackgroundWriter, Receipt
from duoka.errors import CheckpointError
from duoka.strategies.rhythm import Rhythm
from duoka.strategies.stopping import StopSign
from duoka.strategies.strategy import Restorable, Session
from duoka.strategies.training_loop import Position
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
        flags: Mapping[str, Any],
        is_main: Callable[[], bool],
    ) -> None:
        self._session, self._store, self._rhythm = session, store, rhythm
        self._training: Restorable | None = None  # what is saved, once it is known
        self._found: tuple[Found, float] | None = None  # to go on from, and since when it was looked for
        self._also, self._flags, self._is_main = session.borders.also, dict(flags), is_main
        self._stop_sign = StopSign(session.collective, is_main, session.listen_for_termination())
        self._writer: BackgroundWriter | None = None
        self._receipts: list[Receipt] = []
        self._is_training = True  # else a loop has ended, and none has gone on since
        self._first_step = 0  # of this process
        self._saved: tuple[Any, ...] = ()  # the mark of the state that was given to be saved, or was resumed, last
        self.resumes = False  # a run that is started again goes on from what is saved
        self.resumed_step: int | None = None  # what this run went on from
        self._has_begun = False  # a loop has, in this process
        self._is_at_end = False  # the script has come to its end, or to where SIGTERM has ended it
        self._is_stopped = False  # by SIGTERM: a loop that it has left is not finished
        session.at_exit(self._tell_what_is_kept)
        session.at_end_of_script(self._check_end)

    # Going on from one.

    def find(self) -> None:
        """The newest verified one, if there is any: one worker chooses, all of them read it."""
        begin = time.monotonic()
        self.resumes = True
        self._session.keep_checkpoints(self._store.directory, resumes=True)
        turn = Turn(self._session.collective, "strategy.checkpoint", _DEADLINE_S)
        found: Found | None = None
        if turn.is_mine():
            with turn.acting():
                self._open()
                found = self._leave_out_older(self._store.newest(self._session.list_codecs()))
                turn.word = b"" if found is None else found.name.encode()
        else:
            self._store.claim(self._session.run)
            if turn.word and not self._session.is_newcomer:  # who joins a run is given its state
                found = self._leave_out_older(self._store.load(turn.word.decode(), self._session.list_codecs()))
        self.resumed_step = self._session.borders.restart_step
        if found is not None:
            _compare_runs(found, self._facts())
            self._found = found, begin

    def _leave_out_older(self, found: Found | None) -> Found | None:
        """This start continues from a snapshot in memory, unless this checkpoint is of a later step."""
        borders = self._session.borders
        if found is not None and borders.restart_step is not None:
            if found.step <= borders.restart_step:
                return None
            borders.restart_step = None
        return found

    def begin(self, training: Restorable) -> None:
        """It is known what is trained: it goes on from what was found."""
        self._training = training
        if self._found is not None:
            self._take(training, *self._found)
            self._found = None  # and its memory
        self._first_step = training.step if self.resumed_step is None else self.resumed_step
        self._rhythm.begin(self._first_step)

    def _take(self, training: Restorable, found: Found, begin: float) -> None:
        one_sided = _compare_also(self._list_also(), found.state["kinds"])
        self._also.restore(found.state["also"])
        training.restore(found.state["run"])
        self.resumed_step = found.step
        position = found.facts["position"]
        self._saved = found.step, found.facts["batch"], Position(**position) if isinstance(position, dict) else None
        if self._is_main():
            seconds = time.monotonic() - begin
            where = f"{_describe(found.facts)}, of run {found.facts['run']}"
            self._session.say(f"resumed from {found.path}: {where} ({seconds:.1f} s)")
            if one_sided:
                self._session.say(f"registered objects are not those of the saved run: {'; '.join(one_sided)}")
            if changed := _list_changes(found.facts["fingerprint"], self._facts()["fingerprint"]):
                self._session.say(f"not the same bits are promised as where it was saved: {'; '.join(changed)}")

    def set_aside(self) -> None:
        """A new run in a directory with checkpoints: they are kept, where they cannot be taken for this run's."""
        self._session.keep_checkpoints(self._store.directory, resumes=False)
        self.resumed_step = self._session.borders.restart_step  # then they are this run's
        turn = Turn(self._session.collective, "strategy.checkpoint", _DEADLINE_S)
        if turn.is_mine():
            with turn.acting():
                self._open()
                folder = self._store.set_aside() if self.resumed_step is None else None
                if folder is not None:
                    self._session.say(f"resume=False: older checkpoints were moved to {folder}")
        else:
            self._store.claim(self._session.run)

    def _open(self) -> None:
        """A directory that can never be written, or is another run's, is an error at the start."""
        self._store.open()
        self._store.claim(self._session.run)

    # Saving.

    def at_start(self, training: Restorable) -> None:
        """One thing is trained in a run with checkpoints: the state of another one would not be in them."""
        self._has_begun = True
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
        if not self._is_training:
            self._tell_whether_it_trains(True)
        if self._rhythm.is_due(training.step) and self._is_main():
            self._save(training)
        elif self._writer is None and training.step > self._first_step and self._is_main():
            self._writing().reserve(self._collect(training))  # after a step: optimizers have no state before it

    def at_end(self, training: Restorable) -> None:
        if self._is_stopped:
            return
        if self._is_main():
            self._save(training)
        if self._stop_sign.is_here(training.batch):
            self._stop(training)
        self._tell_whether_it_trains(False)

    def _tell_whether_it_trains(self, is_training: bool) -> None:
        self._is_training = is_training
        if self._is_main():
            self._session.say_whether_it_trains(is_training)

    def save(self) -> None:
        """Save now: outside of loops, on all workers alike. It is on the disk when this returns, on each of them.

        Also where this step was saved before: the script may have changed something since. When it cannot be written,
        all of them raise the same CheckpointError. A script that was resumed, and has not come to where it was saved,
        saves nothing: what it would save is not the state of this place.
        """
        self._save_together(must_succeed=True)

    def _save_together(self, *, must_succeed: bool) -> None:
        if self._training is None:
            raise CheckpointError("There is nothing to save yet.", do="call it when training has begun.")
        is_new = self._training.come_to_save()
        turn = Turn(self._session.collective, "a checkpoint", _DEADLINE_S)
        if turn.is_mine():
            with turn.acting():
                if not is_new:
                    return
                self.wait()  # else it would take the place of one that is not written yet
                self._submit(self._training)
                failure = self._wait_for_last()
                if failure is not None and must_succeed:
                    raise failure

    def _save(self, training: Restorable) -> None:
        """Unless this very state is on the disk, or on its way there."""
        if _mark(training) != self._saved or self._failure is not None:
            self._submit(training)

    def _submit(self, training: Restorable) -> None:
        state = self._collect(training)
        self._receipts.append(self._writing().submit(training.step, self._facts(state["run"]), state))
        self._saved = _mark(training)

    def _wait_for_last(self) -> CheckpointError | None:
        """Gives what went wrong with it, which has been said."""
        self.wait()
        return self._failure

    @property
    def _failure(self) -> CheckpointError | None:
        """Of the last one."""
        return self._receipts[-1].failure if self._receipts else None

    def _collect(self, training: Restorable) -> dict[str, Any]:
        return {"run": training.capture(), "also": self._also.capture(), "kinds": self._list_also()}

    def _list_also(self) -> dict[str, str]:
        """Their classes, by name."""
        return {name: type(thing).__name__ for name, thing in self._also.objects.items()}

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
                failure = self._wait_for_last()
                how = "is saved" if failure is None else "is NOT saved"
                self._session.say(f"SIGTERM: step {training.step} {how} in {self._store.directory}")
        self._is_at_end = self._is_stopped = True
        raise SystemExit(TERMINATED)

    def _facts(self, state: dict[str, Any] | None = None) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "seed": self._session.seed,
            "replicas": self._session.num_replicas,
            "fingerprint": self._session.fingerprint() | {name: str(flag) for name, flag in self._flags.items()},
        }
        if state is not None:
            facts |= {name: state[name] for name in ("framework", "step", "batch", "epoch", "position")}
            facts |= {
                "run": self._session.run,
                "workers": self._session.num_workers,
                "agreed_step": state.get("agreed_step"),
            }
        return facts

    @property
    def is_repeating(self) -> bool:
        """Whether the script does again what it has done, on its way to where the run was saved."""
        return self._training is not None and self._training.is_repeating

    def _tell_what_is_kept(self) -> None:
        """The script was interrupted, or has failed."""
        if self._is_at_end or not self._has_begun or not self._is_main():
            return
        steps = [receipt.step for receipt in self._receipts if receipt.is_saved]
        step = steps[-1] if steps else self.resumed_step
        kept = "nothing is saved" if step is None else f"step {step} is the last one that is saved"
        self._session.say(f"the script has not come to its end: {kept} in {self._store.directory}")

    def _tell_what_is_odd(self) -> None:
        if not self._is_main():
            return
        if self._training is None:
            self._session.say(
                f"nothing was saved in {self._store.directory}: no loop over a prepared loader, or over"
                " strategy.distribute_dataset, and no fit in strategy.scope() has begun"
            )
        elif self.is_ahead and self._also.objects:
            self._session.say("no loop has begun: registered objects were as the script had made them, not as saved")

    def _check_end(self) -> None:
        self._is_at_end = True
        self._tell_what_is_odd()
        if self.resumed_step is not None and self.is_repeating:
            raise CheckpointError(
                f"The script has ended before it came to where the run was saved, at step {self._first_step}.",
                why="between its loops it went another way than before: fewer epochs, or a decision from values that"
                " are not those of then (a variable, a validation in a loop of its own).",
                do="loop over strategy.epochs, decide by strategy.evaluate and by registered objects; or begin"
                " a new run in another directory. What was saved is as it was.",
            )

    @property
    def is_ahead(self) -> bool:
        """A script was resumed, and is before its first loop: the weights are those of the save already."""
        return self.resumed_step is not None and not self._has_begun

    def _summarise(self) -> None:
        stalls = [receipt.stall_s * 1000 for receipt in self._receipts]
        if not stalls:
            return
        num_saved = sum(receipt.is_saved for receipt in self._receipts)
        count = f"{num_saved} checkpoint{'' if num_saved == 1 else 's'}"
        held_up = f"{statistics.median(stalls):.1f} ms (median), {max(stalls):.1f} ms at most"
        num_replaced = sum(receipt.is_replaced for receipt in self._receipts)
        num_failed = len(stalls) - num_saved - num_replaced
        rest = f"; {num_replaced} more gave way to newer ones" if num_replaced else ""
        rest += f"; {num_failed} more could NOT be saved" if num_failed else ""
        if not self._receipts[-1].is_saved:
            rest += ", the last one among them"
        self._session.say(f"{count} in {self._store.directory}, training held up for {held_up}{rest}")

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None and self._training is not None:
            self._save_together(must_succeed=False)  # what follows the block is not to be lost for it
            self._tell_whether_it_trains(False)
        else:
            self.wait(_DEADLINE_ON_ERROR_S)


def _mark(training: Restorable) -> tuple[Any, ...]:
    """Tells one state from another: one step may have several boundaries."""
    return training.step, training.batch, getattr(training, "boundary", None)


def missing(path: Any) -> str:
    """Said where a script would save again what it has saved before, and the file is gone."""
    return (
        f"{path} is not there, and is not written now: the script has not come to where the run was saved, and would"
        " write the weights of that place"
    )


def _compare_runs(found: Found, facts: dict[str, Any]) -> None:
    """The same R and the same seed, or it would be another run."""
    for name, why in (
        ("replicas", "with another number of replicas the sums are added up differently"),
        ("seed", "with another seed the data come in another order"),
    ):
        if found.facts[name] != facts[name]:
            at_most = f" (on {found.facts[name]} devices, or fewer)" if name == "replicas" else ""
            raise CheckpointError(
                f"{found.path} is of a run with {name}={found.facts[name]}; this one has {name}={facts[name]}.",
                why=f"{why}: it would not be the same run any more.",
                do=f"use {name}={found.facts[name]}{at_most}, another directory, or resume=False for a new run.",
            )


def _compare_also(here: Mapping[str, str], saved: Mapping[str, str]) -> list[str]:
    """Things of the same classes under the same names. Gives what is on one side only."""
    for name, kind in here.items():
        if saved.get(name, kind) != kind:
            raise CheckpointError(
                f"{name!r} is registered as {kind} here, and {saved[name]} in the saved run.",
                do=f"use {saved[name]}, or begin a new run in another directory.",
            )
    missing = [f"{name!r} was saved, and is not given here" for name in saved if name not in here]
    return missing + [f"{name!r} was not saved, and begins as it is given" for name in here if name not in saved]


def _list_changes(saved: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    names = sorted({*saved, *here})
    return [f"{n} was {saved.get(n)}, is {here.get(n)}" for n in names if saved.get(n) != here.get(n)]


def _describe(facts: Mapping[str, Any]) -> str:
    """Where the run goes on. Not "epoch 3", which is the third one to some and the fourth one to others.

    >>> _describe({"step": 120, "epoch": 3, "position": [{"passes": 3, "batches": 24}]})
    'step 120, after 3 epochs and 24 batches'
    """
    if isinstance(facts["position"], dict):
        return f"step {facts['step']}, {Position(**facts['position']).describe()}"
    epochs, batches = facts["epoch"], next((place["batches"] for place in facts["position"] if place["batches"]), 0)
    counts = f"{epochs} epoch{'' if epochs == 1 else 's'} and {batches} batch{'' if batches == 1 else 'es'}"
    return f"step {facts['step']}, after {counts}"
