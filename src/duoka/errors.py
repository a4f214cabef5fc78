"""Every exception a user of Duoka can meet.

DuokaError                  what happened, why, what to do
├── DeviceError             a device that is not here, or cannot be used      (exit code 69)
│   └── OutOfMemory         a device's memory limit, or shared memory, is used up
├── TopologyError           replicas and workers that do not fit together
├── LaunchError             workers cannot be started from here
├── MismatchError           workers called different things, or with different shapes
├── WorkerLost              a worker died and its part cannot be made up for
├── WorkerLeft              a worker finished its script while others wait for it
├── WorkerFailed            another worker's code raised where this one waited for it
├── CheckpointError         a state that cannot be saved, or a file that cannot be loaded
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
    pass


class WorkerLost(DuokaError):
    pass


class WorkerLeft(DuokaError):
    pass


class WorkerFailed(DuokaError):
    pass


class CheckpointError(DuokaError):
    pass


class DeadlineExceeded(DuokaError):
    exit_code = 75


class Stopped(BaseException):
    """The supervisor ends this run; raised in workers that wait, so that ``finally`` blocks run."""
