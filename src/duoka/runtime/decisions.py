"""What the supervisor decides, as pure functions of what it knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from duoka.checkpoint.memory_snapshot import Entry
from duoka.topology.membership import Membership


class State(Enum):
    RUNNING = "running"
    JOINING = "joining"  # started in the place of a lost one, and not a member yet
    LEFT = "left"  # finished its script, exit code 0
    FAILED = "failed"  # its own code raised or exited with another code
    LOST = "lost"  # killed by a signal


def judge(exit_status: int, *, reported_failure: bool) -> State:
    """Exit statuses as subprocess gives them: negative for a signal.

    >>> judge(0, reported_failure=False), judge(3, reported_failure=False), judge(-9, reported_failure=False)
    (<State.LEFT: 'left'>, <State.FAILED: 'failed'>, <State.LOST: 'lost'>)
    """
    if exit_status < 0 and not reported_failure:
        return State.LOST
    return State.LEFT if exit_status == 0 and not reported_failure else State.FAILED


def exit_code(exit_status: int) -> int:
    """As shells show it: 128 + n after signal n.

    >>> exit_code(3), exit_code(-9)
    (3, 137)
    """
    return exit_status if exit_status >= 0 else 128 - exit_status


@dataclass(frozen=True)
class Kept:
    """Where a run keeps its checkpoints, and whether it goes on from them when it starts."""

    directory: str
    resumes: bool


@dataclass(frozen=True)
class WayBack:
    """What a run that has ended could go on from, and what it has ended for."""

    why: str
    directory: str  # of checkpoints; empty: there are none to go on from
    is_wanted: bool = True  # otherwise the run ends, and whoever starts it again goes this way
    agreed_step: int | None = None  # replicas have differed since: what was saved later may be wrong
    snapshot: Entry | None = None  # in memory; a checkpoint of a later step is taken instead
    lost_at: float = 0.0  # when, on the clock of snapshots


@dataclass(frozen=True, order=True)
class Standing:
    """How far a worker is: the last call it completed, and the steps it has behind it."""

    completed: int = 0
    steps: int = 0


@dataclass
class Vote:
    """The survivors' reports after a loss. Complete when every living worker has given one."""

    membership: Membership
    reports: dict[int, Standing] = field(default_factory=dict)

    def report(self, worker: int, generation: int, standing: Standing) -> None:
        """Reports of an older generation are late and do not count."""
        if generation == self.membership.generation and worker in self.membership.workers:
            self.reports[worker] = standing

    def outcome(self, left: Iterable[Standing]) -> Standing | None:
        """Where the furthest is, once all have reported. Those who left count with their last."""
        if set(self.reports) != set(self.membership.workers):
            return None
        return max([*self.reports.values(), *left], default=Standing())
