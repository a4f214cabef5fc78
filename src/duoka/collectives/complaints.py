"""The errors of those who wait in vain: whom they wait for, where it was seen last, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from duoka.collectives.board import Board
from duoka.errors import DeadlineExceeded, WorkerLeft


class Complaints:
    """By one worker about the others."""

    def __init__(self, worker: int, board: Board, describe: Callable[[int], str]) -> None:
        self._worker, self._board, self._describe = worker, board, describe

    def is_alive(self, worker: int) -> bool:
        return _process_state(self._board.read(worker).pid) in ("running", "sleeping")

    def late(
        self, missing: Sequence[int], phase: str, step: int, deadline_s: float, num_others: int
    ) -> DeadlineExceeded:
        """The first of the missing has not done this; so many others are not missing."""
        late = missing[0]
        pid = self._board.read(late).pid
        activity = self._board.tell_activity(self._worker)
        what = f"{self._describe(late)} has not {phase} at step {step} for {deadline_s:g} s"
        what += f" ({activity}); {num_others} other{'s wait' if num_others != 1 else ' waits'}."
        if len(missing) > 1:
            what += " Also missing: " + ", ".join(self._describe(w) for w in missing[1:]) + "."
        return DeadlineExceeded(
            what,
            why=f"it was last seen in: {self._board.tell_activity(late)}; its process {pid} is {_process_state(pid)}."
            if pid
            else "it has not come to its strategy yet: it is still starting, or busy with what comes before.",
            do="raise deadline_s if one step may take that long; its log has the rest.",
        )

    def left(self, worker: int, num_calls: int, number: int) -> WorkerLeft:
        """This worker took part in so many calls, and is missing in this one."""
        return WorkerLeft(
            f"{self._describe(worker)} has finished its script; {self._describe(self._worker)} waits for it"
            f" in {self._board.tell_activity(self._worker)}.",
            why=f"it took part in {num_calls} calls, and this is call {number}: the workers did not run the same loop.",
            do="let all workers run the same number of steps and make the same calls. A condition that ends the loop"
            " must be the same on all workers, and no call between workers may stand under `if strategy.is_main:`.",
        )

    def still_there(self, worker: int, phase: str, step: int) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._describe(worker)} has not {phase} at step {step}.")

    def not_joined(self, step: int, deadline_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"A worker was about to join at step {step}, and has not after {deadline_s:g} s.",
            why="a worker has not come to this border of steps, or its state could not be handed over in time.",
            do="raise deadline_s if that may take so long, or start with respawn=False.",
        )

    def undecided(self, step: int) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"After a loss, not all survivors came to step {step} in time.",
            why="a worker that computes or is stuck has not reported yet.",
            do="raise deadline_s if one step may take that long.",
        )


def _process_state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"T": "stopped (SIGSTOP)", "t": "held by a debugger", "R": "running", "S": "sleeping"}.get(letter, letter)
