"""Real workers for tests: a function run by forks under the real supervisor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from duoka.devices.device import Device
from duoka.devices.virtual import cut
from duoka.runtime.launch import Launched, launch
from duoka.runtime.plan import Plan
from duoka.runtime.worker import attachment
from duoka.session import _join
from tests.abandoned import list_abandoned
from tests.lean import sitecustomize as lean
from tests.limits import START_S

# Tests started in the background, or by nohup, begin with signals ignored, and so would the runs that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# On a busy machine an example takes its time, and that says nothing about the code.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# For all processes that tests start, as for this one.
LEAN = str(Path(lean.__file__).parent)
if LEAN not in (found := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([LEAN, *filter(None, found)])


def plan_for(num_workers: int, num_replicas: int, deadline_s: float = 20.0) -> Plan:
    return Plan(
        devices=tuple(cut(Device("cpu", 0), num_workers)),
        num_replicas=num_replicas,
        threads=1,
        deadline_s=deadline_s,
    )


@dataclass(frozen=True)
class Told(Launched):
    """With what Duoka itself had to say."""

    said: list[str]


def run_workers(
    num_workers: int, num_replicas: int, body: Callable[..., Any], *args: Any, deadline_s: float = 20.0
) -> Told:
    """Run body(collective, *args) on forked workers; what happened is returned, not raised."""

    def in_worker() -> Any:
        attached = attachment()
        assert attached is not None
        return body(_join(attached).collective, *args)

    said: list[str] = []
    before = remains()
    launched = launch(plan_for(num_workers, num_replicas, deadline_s), in_worker, said.append)
    check_remains(before, said)
    return Told(launched.outcome, launched.results, said)


@dataclass(frozen=True)
class Remains:
    """Processes below this one, its descriptors and what they lead to, and what nobody has in /dev/shm."""

    children: frozenset[int]
    descriptors: frozenset[tuple[str, str]]
    abandoned: frozenset[str]

    def since(self, before: Remains) -> Remains:
        """What has come since then. What earlier tests had left to the garbage collector may have gone meanwhile."""
        return Remains(
            self.children - before.children, self.descriptors - before.descriptors, self.abandoned - before.abandoned
        )


NOTHING = Remains(frozenset(), frozenset(), frozenset())


def remains() -> Remains:
    # The folder that is listed has a descriptor itself, which is gone when it is asked about.
    descriptors = {(name, target) for name in os.listdir("/proc/self/fd") if (target := _target(name))}
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    return Remains(frozenset(children), frozenset(descriptors), frozenset(list_abandoned()))


def check_remains(before: Remains, told: Any = "") -> None:
    """Nothing new is there. Files in /dev/shm may be those of a test beside this one, for a moment."""
    until = time.monotonic() + START_S
    while (new := remains().since(before)) != NOTHING:
        is_from_beside = not new.children and not new.descriptors
        assert is_from_beside and time.monotonic() < until, f"left behind: {new}; {told}"
        time.sleep(0.05)


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def die_at(collective, number: int) -> None:
    """Kill this worker at the n-th moment at which a worker can die."""
    count = 0

    def moment(name: str) -> None:
        nonlocal count
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    collective.moment = moment


@pytest.fixture
def workers() -> Callable[..., Launched]:
    return run_workers
