"""Faults that are planned: who dies, and when. A plan comes from a seed, so that each failure can be replayed."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Strike:
    """Kill a worker, by SIGKILL, at one of these moments.

    at_call: a part of all calls (of Python and of C functions) that its main thread makes in a calm run.
    after: a part of the time that a calm run takes; another thread does it, wherever the main one is.
    at_place, n: the n-th time that the script, or the exchange, comes by a place with this name.
    calls: so many calls after that place.
    """

    worker: int
    at_call: float | None = None
    after: float | None = None
    at_place: str | None = None
    n: int = 0
    calls: int = 0


@dataclass(frozen=True)
class Calm:
    """What an undisturbed run is like: calls of each worker, and seconds."""

    calls: dict[int, int]
    seconds: float


class Victim:
    """Lives in a worker, and ends it as planned. Where nothing is planned it counts calls, if asked to."""

    def __init__(self, worker: int, strikes: Iterable[Strike], calm: Calm | None) -> None:
        mine = [strike for strike in strikes if strike.worker == worker]
        self._strike = mine[0] if mine else None
        self._seen = 0
        self.calls = 0
        if calm is None:
            self._count_calls(None)
        elif self._strike is not None and self._strike.at_call is not None:
            self._count_calls(int(self._strike.at_call * calm.calls[worker]))
        elif self._strike is not None and self._strike.after is not None:
            self._die_later(self._strike.after * calm.seconds)

    def _count_calls(self, last: int | None) -> None:
        self.calls = 0

        def see(frame: Any, event: str, argument: Any) -> None:
            if event in ("call", "c_call"):
                if self.calls == last:
                    die()
                self.calls += 1

        sys.setprofile(see)

    def _die_later(self, seconds: float) -> None:
        def wait() -> None:
            time.sleep(seconds)
            die()

        threading.Thread(target=wait, daemon=True).start()

    def pass_by(self, place: str) -> None:
        strike = self._strike
        if strike is None or strike.at_place != place:
            return
        self._seen += 1
        if self._seen == strike.n + 1:
            if strike.calls == 0:
                die()
            self._count_calls(strike.calls)

    def await_death(self) -> None:
        """The script is at its end: a death that is planned by the clock may still be to come.

        One that is planned by calls comes now, at the latest: after another death there may be fewer of them.
        """
        sys.setprofile(None)
        if self._strike is not None and self._strike.after is not None:
            time.sleep(30)
        if self._strike is not None and self._strike.at_call is not None:
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def choose_strikes(chance: random.Random, num_workers: int) -> tuple[Strike, ...]:
    """One death mostly, sometimes two, or all but one; any worker, at any moment."""
    num_victims = chance.choice([1, 1, 1, 2, num_workers - 1])
    strikes = []
    for worker in chance.sample(range(num_workers), min(num_victims, num_workers - 1)):
        if chance.random() < 0.6:
            strikes.append(Strike(worker, at_call=chance.uniform(0, 0.98)))
        else:
            strikes.append(Strike(worker, after=chance.uniform(0, 1.1)))
    return tuple(strikes)
