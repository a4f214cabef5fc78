"""Going back: all workers of a run start anew, and go on from its last checkpoint.

For what survivors cannot make up for: a worker lost in the middle of a step that cannot be done again. They fail, as
they do without checkpoints, and end; when nobody is left, as many as at the first time are started in the same run.
As many, so that the bits are those of a calm run even where they depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable

from duoka.checkpoint.names import list_places
from duoka.errors import CheckpointError
from duoka.runtime.decisions import WayBack
from duoka.runtime.supervisor import Outcome, Supervisor

MOST_RETURNS = 3  # of one run


def run_to_the_end(
    supervisor: Supervisor,
    say: Callable[[str], None],
    wakeup: int | None = None,
    signals: Callable[[], int | None] = lambda: None,
) -> Outcome:
    """Run, and go back where that is called for. The outcome is the last one, with all that were lost on the way."""
    returns = Returns(say)
    outcome = supervisor.run(wakeup, signals)
    while returns.is_wanted(outcome.way_back):
        lost, supervisor = outcome.lost, supervisor.make_next()
        outcome = supervisor.run(wakeup, signals)
        outcome.lost[:0] = lost
    return outcome


class Returns:
    """How often a run has gone back, and whether it does so once more."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._count = 0

    def is_wanted(self, way_back: WayBack | None) -> bool:
        """Says what happens, in one line; nothing about a run that has no way back."""
        if way_back is None:
            return False
        if self._count == MOST_RETURNS:
            self._say(f"{way_back.why}; the run has gone back {MOST_RETURNS} times before, and ends.")
            return False
        self._count += 1
        times = f"{self._count} of at most {MOST_RETURNS} times"
        self._say(f"{way_back.why}: all workers start anew, {_tell_where(way_back.directory)} ({times}).")
        return True


def _tell_where(directory: str) -> str:
    """By its name: whether it is whole is seen by those who read it, and they say what they go on from."""
    try:
        places = list_places(directory)
    except CheckpointError as error:
        return f"and look for a checkpoint ({error.what.rstrip('.')})"
    if not places:
        return "from the beginning, because no checkpoint has been written yet"
    return f"and go back to the checkpoint of step {places[-1].step}"
