"""Going back: all workers of a run start anew, and go on from a snapshot in memory or a checkpoint.

For what they cannot make up for: one was lost in the middle of a step that cannot be done again, all were lost, or they
differ, and nobody can say who is right. They fail, as they do without checkpoints, and end; when nobody is left, as
many as at the first time are started in the same run. As many, so that the bits are those of a calm run even where they
depend on the number of workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from duoka.checkpoint.disk import Disk
from duoka.checkpoint.memory_snapshot import Entry
from duoka.checkpoint.names import list_places
from duoka.checkpoint.setting_aside import move_aside
from duoka.errors import CheckpointError
from duoka.runtime.decisions import WayBack
from duoka.runtime.shutdown import Outcome
from duoka.runtime.supervisor import Supervisor

MOST_RETURNS = 3  # of one run; with snapshots in memory, of those that start at the same step
_DEADLINE_S = 60.0


def run_to_the_end(
    supervisor: Supervisor,
    say: Callable[[str], None],
    wakeup: int | None = None,
    signals: Callable[[], int | None] = lambda: None,
) -> Outcome:
    """Run, and go back where that is called for. The outcome is the last one, with all that were lost on the way."""
    returns = Returns(say)
    try:
        outcome = supervisor.run(wakeup, signals)
        while outcome.way_back is not None and returns.clear(outcome.way_back):
            lost, supervisor = outcome.lost, supervisor.make_next()
            outcome = supervisor.run(wakeup, signals)
            outcome.lost[:0] = lost
        return outcome
    finally:
        supervisor.end_run()


class Returns:
    """How often a run has gone back, and whether it does so once more."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._count = 0
        self._restarts = Restarts()
        self._agreed_step = -1  # where the replicas that have differed before were equal

    def clear(self, way_back: WayBack) -> bool:
        """See to it that no checkpoint lies there that is not to be used. True: the run goes back, and this is said."""
        is_clear = self._set_suspects_aside(way_back)
        if not way_back.is_wanted or not is_clear:
            return False
        if reason := self._why_not(way_back):
            self._say(f"{way_back.why}; {reason}, and the run ends.")
            return False
        self._say(f"{way_back.why}; all workers {self._begin(way_back)}.")
        return True

    def _begin(self, way_back: WayBack) -> str:
        """Count this start. Returns where it goes on, in words."""
        if (snapshot := way_back.snapshot) is None:
            self._count += 1
            return f"start anew, {_tell_where(way_back.directory)} ({self._count} of at most {MOST_RETURNS} times)"
        what, step = _choose(snapshot, way_back.directory)
        self._restarts.note(step)
        repeated = f" ({way_back.lost_at - snapshot.at:.1f} s of training are repeated)"
        return f"restart from the {what} of step {step}{repeated if step == snapshot.step else ''}"

    def _why_not(self, way_back: WayBack) -> str:
        if way_back.snapshot is not None:
            _, step = _choose(way_back.snapshot, way_back.directory)
            if self._restarts.count(step) == MOST_RETURNS:
                return f"it has started {MOST_RETURNS} times from step {step}, and has come to no later snapshot"
        elif self._count == MOST_RETURNS:
            return f"it has gone back {MOST_RETURNS} times before"
        if way_back.agreed_step is not None:
            before, self._agreed_step = self._agreed_step, way_back.agreed_step
            if way_back.agreed_step <= before:
                return "they have not been equal at a later step since this happened before"
        return ""

    def _set_suspects_aside(self, way_back: WayBack) -> bool:
        """Whoever starts the run again by hand is not to go on from them either. They are kept."""
        step = way_back.agreed_step
        if step is None:
            return True
        try:
            folder = move_aside(Disk(), way_back.directory, step, _DEADLINE_S)
        except (OSError, CheckpointError) as error:
            reason = error.what if isinstance(error, CheckpointError) else error.strerror
            self._say(
                f"checkpoints in {way_back.directory} of steps after {step} may hold wrong values, and could not be"
                f" moved aside ({reason}): move them away before the run is started again."
            )
            return False
        if folder is not None:
            names = ", ".join(sorted(os.listdir(folder)))
            self._say(
                f"replicas were last equal at step {step}; what was saved after it may hold wrong values, and is"
                f" left out: {names} moved to {folder}."
            )
        return True


class Restarts:
    """Starts in a row that have not come further than the one before."""

    def __init__(self) -> None:
        self._step, self._count = -1, 0

    def count(self, step: int) -> int:
        """How many there have been from this step on, or from a later one."""
        return self._count if step <= self._step else 0

    def note(self, step: int) -> None:
        self._count = self.count(step) + 1
        self._step = max(self._step, step)


def _choose(snapshot: Entry, directory: str) -> tuple[str, int]:
    """What workers start from, and its step: the snapshot, unless a checkpoint is of a later step.

    By its name: one that turns out to be damaged is left out by those who read it, and they say so.
    """
    with suppress(CheckpointError):
        places = list_places(directory) if directory else []
        if places and places[-1].step > snapshot.step:
            return "checkpoint", places[-1].step
    return "snapshot in memory", snapshot.step


def _tell_where(directory: str) -> str:
    """By its name: whether it is whole is seen by those who read it, and they say what they go on from."""
    try:
        places = list_places(directory)
    except CheckpointError as error:
        return f"and look for a checkpoint ({error.what.rstrip('.')})"
    if not places:
        return "from the beginning, because there is no checkpoint yet"
    return f"and go back to the checkpoint of step {places[-1].step}"
