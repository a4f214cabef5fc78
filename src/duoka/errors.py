"""Every exception a user of Duoka can meet.

DuokaError                  what happened, why, what to do
├── DeviceError             a device that is not here, or cannot be used      (exit code 69)
│   └── OutOfMemory         a device's memory limit, or shared memory, is used up
├── TopologyError           replicas and workers that do not fit together
├── LaunchError             workers cannot be started from here
├── MismatchError           workers called different things, or with different shapes
│   └── ReplicasDiffer      their weights have drifted apart, and none has a majority (exit code 76)
├── WorkerLost              a worker died and its part cannot be made up for
├── WorkerLeft              a worker finished its script while others wait for it
├── WorkerFailed            another worker's code raised where this one waited for it
├── ReplicaFailed           the function of a replica on another worker raised
├── CannotJoin              a worker in the place of a lost one whose script does not fit to the run
├── CheckpointError         a state that cannot be saved, or a file that cannot be loaded
│   └── CheckpointDamaged   files that are not what Duoka has written          (exit code 65)
│       └── CheckpointOfOtherVersion   or what another version of it has
├── RehearsalError          a script that cannot be rehearsed                  (exit code 2)
│   └── ScriptFailed        a script that fails without being disturbed        (exit code 3)
├── JournalError            a journal that cannot be read, or two that cannot be compared (exit code 2)
└── DeadlineExceeded        somebody did not arrive in time                   (exit code 75)
Stopped (BaseException)     the run is ending; not caught by ``except Exception``
"""

from __future__ import annotations


class DuokaError(Exception):
    """What happened, why, and what to do, in this order.

    >>> print(TopologyError("4 replicas cannot be placed on 6 workers.", why="two would idle.", do="use 4."))
    4 replicas cannot be placed on 6 workers.
      why  two would idle.
      do   use 4.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", do: str = "") -> None:
        self.what, self.why, self.do = what, why, do
        lines = [what]
        if why:
            lines.append("  why  " + why.replace("\n", "\n       "))
        if do:
            lines.append("  do   " + do.replace("\n", "\n       "))
        super().__init__("\n".join(lines))


class DeviceError(DuokaError):
    exit_code = 69


class OutOfMemory(DeviceError):
    pass


class TopologyError(DuokaError):
    pass


class LaunchError(DuokaError):
    pass


class MismatchError(DuokaError):
    calls: dict[str, str] | None = None  # by worker, where workers called different things


class WorkerLost(DuokaError):
    pass


class WorkerLeft(DuokaError):
    pass


class WorkerFailed(DuokaError):
    pass


class ReplicaFailed(DuokaError):
    pass


class CannotJoin(DuokaError):
    pass


class JoinLater(DuokaError):
    """A replacement worker cannot join where it is. Started again, it may between two epochs."""


class CheckpointError(DuokaError):
    pass


class CheckpointDamaged(CheckpointError):
    exit_code = 65


class CheckpointOfOtherVersion(CheckpointDamaged):
    pass


class RehearsalError(DuokaError):
    exit_code = 2


class ScriptFailed(RehearsalError):
    exit_code = 3


class JournalError(DuokaError):
    exit_code = 2


class ReplicasDiffer(MismatchError):
    exit_code = 76
    agreed_step = 0  # where they were last found equal


class DeadlineExceeded(DuokaError):
    exit_code = 75


class Stopped(BaseException):
    """The supervisor ends this run; raised in workers that wait, so that ``finally`` blocks run."""


_inside: list[BaseException] = []  # the newest error that was raised in a call out of a framework's graph


def keep_inside(error: BaseException) -> None:
    """Remember what is raised where a framework will make an error of its own of it."""
    _inside[:] = [error]


def uncover(error: BaseException) -> BaseException:
    """What was raised inside a graph, if this is the error that a framework has made of it; else the error itself.

    >>> keep_inside(lost := WorkerLost("worker 1 was lost."))
    >>> uncover(RuntimeError("{{node step}} WorkerLost: worker 1 was lost. [Op:__inference_step]")) is lost
    True
    """
    for inner in _inside:
        if inner is not error and isinstance(inner, DuokaError) and inner.what in str(error):
            return inner.with_traceback(error.__traceback__)  # the user's lines are those of the graph's call
    return error
