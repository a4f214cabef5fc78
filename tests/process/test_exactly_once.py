"""Workers killed at every moment of the exchange; the weights end with the bits of a calm run.

Each seed is a story: how many replicas and workers, which worker dies, and when. Deaths
happen at a named moment of the protocol, in the middle of an announcement, or at a random instant, by another
process's kill -9.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from dataclasses import dataclass

import numpy as np
import pytest

from duoka.collectives.arrays import weigh
from duoka.collectives.kept import Kept
from duoka.collectives.solo import solo
from tests.conftest import run_workers

STEPS = 6
WEIGHT = 1 / 3  # of each replica
SIZES = {"small": 500, "large": 60_000}  # floats: one meeting, or two with the work shared by slices


@dataclass(frozen=True)
class Strike:
    """Kill this worker at its n-th moment, or this many seconds after it has started, or in the middle of its
    n-th announcement, when one of the others has heard it and the rest have not."""

    worker: int
    moment: int | None = None
    after_s: float | None = None
    announcement: int | None = None


@dataclass(frozen=True)
class Story:
    num_workers: int
    num_replicas: int
    size: str
    strikes: tuple[Strike, ...]
    keeps: bool = False  # what only this worker reads, in memory of its own


def gradient(replica: int, step: int, weights: np.ndarray) -> np.ndarray:
    """Depends on everything that must not be lost or applied twice."""
    phase = np.arange(weights.size, dtype=np.float32) * np.float32(1 + replica) + np.float32(step)
    return (weights * np.float32(1.0 + 0.1 * replica) + np.sin(phase)).astype(np.float32)


def write(exchange, buffer, replica: int, values: np.ndarray, *, keeps: bool) -> bool:
    """Returns whether the worker has kept a part of them."""
    slot = exchange.slot(buffer, replica)
    weigh(values, WEIGHT, slot)
    own = exchange.own_slice(buffer, replica) if keeps else None
    if own is None:
        return False
    slot[own] = np.nan  # nobody may read it before it is added up
    half = values.size // 2
    exchange.keep(buffer, Kept(replica, own, [(0, values[:half]), (half + 5, values[half + 5 :])], WEIGHT, []))
    slot[half : half + 5] = values[half : half + 5] * np.float32(WEIGHT)  # a gap between two arrays
    return True


def read(exchange, buffer) -> np.ndarray:
    """The sum, in memory of this worker's own as far as it has kept something."""
    result, kept = np.array(exchange.result(buffer)), exchange.find_kept(buffer)
    for begin, part in kept.inside() if kept is not None else ():
        assert result[begin : begin + part.size].tobytes() == part.tobytes(), "all workers have the same sum"
        result[begin : begin + part.size] = part
    return result


def train(collective, size: str, strikes: tuple[Strike, ...], keeps: bool = False) -> dict:
    mine = [strike for strike in strikes if strike.worker == collective.worker]
    moments = 0

    def moment(name: str) -> None:
        nonlocal moments
        if any(strike.moment == moments for strike in mine):
            os.kill(os.getpid(), signal.SIGKILL)
        moments += 1

    collective.moment = moment
    for strike in mine:
        if strike.after_s is not None:
            _kill_later(strike.after_s)
        if strike.announcement is not None:
            _kill_between_receivers(collective.meeting._mailbox, strike.announcement)
    buffers = [collective.buffer(SIZES[size], "f4"), collective.buffer(1, "i8")]
    weights = np.zeros(SIZES[size], np.float32)
    applied = num_kept = 0
    for step in range(STEPS):
        exchange = collective.exchange(buffers)
        while True:
            for replica in exchange.missing:
                num_kept += write(exchange, buffers[0], replica, gradient(replica, step, weights), keeps=keeps)
                exchange.slot(buffers[1], replica)[:] = 10**step
                exchange.deposit(replica, b"%d/%d" % (step, replica))
            if exchange.commit():
                break
        assert exchange.notes == [b"%d/%d" % (step, r) for r in range(collective.num_replicas)]
        weights -= np.float32(0.05) * read(exchange, buffers[0])
        applied += int(exchange.result(buffers[1])[0])
        collective.end_step()
    if any(strike.after_s is not None for strike in mine):
        time.sleep(20)  # its death comes after the last step
    found = {"sha256": hashlib.sha256(weights.tobytes()).hexdigest(), "applied": applied}
    return found | {"moments": moments, "kept": num_kept}


def _kill_later(seconds: float) -> None:
    victim = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(victim, signal.SIGKILL)
        os._exit(0)


def _kill_between_receivers(mailbox, announcement: int) -> None:
    send, count = mailbox.send, 0

    def send_and_die(receivers, message) -> None:
        nonlocal count
        if count == announcement:
            send(tuple(receivers)[:1], message)
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        send(receivers, message)

    mailbox.send = send_and_die


_calm: dict[tuple[int, str], dict] = {}


def calm(num_replicas: int, size: str) -> dict:
    if (num_replicas, size) not in _calm:
        alone = solo(num_replicas, available_bytes=lambda: 2**40)
        _calm[num_replicas, size] = train(alone, size, ())
    return _calm[num_replicas, size]


def write_story(seed: int) -> Story:
    chance = random.Random(seed)
    num_workers = chance.randint(2, 4)
    num_replicas = chance.randint(num_workers, 6)
    size = chance.choice(list(SIZES))
    victims = chance.sample(range(num_workers), chance.choice([1, 1, 2, num_workers - 1]) if num_workers > 2 else 1)
    strikes = []
    for victim in victims:
        kind = chance.choice(["moment", "instant", "announcement"])
        if kind == "announcement":
            strikes.append(Strike(victim, announcement=chance.randrange(STEPS)))
        elif kind == "moment":
            # A worker passes at least this many moments: five a step, and one less where it takes a result late.
            strikes.append(Strike(victim, moment=chance.randrange(5 * STEPS - 2)))
        else:
            strikes.append(Strike(victim, after_s=chance.uniform(0, 0.03)))
    return Story(num_workers, num_replicas, size, tuple(strikes))


def check(story: Story) -> None:
    launched = run_workers(story.num_workers, story.num_replicas, train, story.size, story.strikes, story.keeps)
    told = f"{story}: {launched.outcome}"
    assert launched.outcome.exit_code == 0, told
    assert sorted(worker for worker, _ in launched.outcome.lost) == sorted(s.worker for s in story.strikes), told
    assert all(number == signal.SIGKILL for _, number in launched.outcome.lost), told
    assert len(launched.results) == story.num_workers - len(story.strikes), told
    expected = calm(story.num_replicas, story.size)
    for worker, result in launched.results.items():
        assert result["sha256"] == expected["sha256"], f"worker {worker}: {told}"
        assert result["applied"] == expected["applied"], f"worker {worker}: {told}"
        is_kept = story.keeps and story.num_workers == story.num_replicas and story.size == "large"
        assert bool(result["kept"]) == is_kept, f"worker {worker}: {told}"


@pytest.mark.parametrize("block", [*range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 20))])
def test_workers_killed_at_random_moments_change_no_bit(block):
    for seed in range(10 * block, 10 * block + 10):
        check(write_story(seed))


@pytest.mark.parametrize("size", list(SIZES))
def test_a_worker_killed_at_each_moment_in_turn_changes_no_bit(size):
    for moment in range(5 * 3):  # three steps, moment by moment
        check(Story(2, 2, size, (Strike(moment % 2, moment=moment),)))


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_worker_killed_at_each_moment_changes_no_bit_where_workers_keep_their_own_slices(num_workers):
    for moment in range(5 * 3):
        check(Story(num_workers, num_workers, "large", (Strike(moment % num_workers, moment=moment),), keeps=True))


def test_a_second_worker_killed_during_recovery_changes_no_bit_where_workers_keep_their_own_slices():
    for later in range(7, 12):
        check(Story(3, 3, "large", (Strike(0, moment=6), Strike(2, moment=later)), keeps=True))


@pytest.mark.parametrize("victim", [0, 1])
def test_an_announcement_cut_short_changes_no_bit_where_workers_keep_their_own_slices(victim):
    for announcement in range(STEPS):
        check(Story(2, 2, "large", (Strike(victim, announcement=announcement),), keeps=True))


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 5])
def test_a_calm_run_of_workers_that_keep_their_own_slices_has_the_bits_of_one(num_replicas):
    """A worker of several replicas makes their partial sums in the slots, and keeps nothing."""
    launched = run_workers(2, num_replicas, train, "large", (), True)
    expected = calm(num_replicas, "large")
    kept = {worker: result.pop("kept") for worker, result in launched.results.items()}
    assert kept == {0: STEPS * (num_replicas == 2), 1: STEPS * (num_replicas < 4)}
    assert all(result["sha256"] == expected["sha256"] for result in launched.results.values())


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_worker_killed_while_some_have_heard_it_and_others_not_changes_no_bit(size, victim):
    for announcement in range(STEPS):
        check(Story(3, 6, size, (Strike(victim, announcement=announcement),)))


def test_all_but_one_worker_killed_at_the_same_moment_change_no_bit():
    check(Story(4, 5, "large", tuple(Strike(worker, moment=7) for worker in (0, 1, 3))))


def test_a_second_worker_killed_during_recovery_changes_no_bit():
    for later in range(7, 12):
        check(Story(3, 3, "large", (Strike(0, moment=6), Strike(2, moment=later))))


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.slow)])
def test_a_second_death_while_replicas_are_dealt_anew_changes_no_bit(size):
    """The second victim is heard by one survivor, which crosses the border of the step, and not by the other."""
    per_step = 1 if size == "small" else 3  # announcements: arrived, reduced, taken
    for first in range(4, 9):
        for later in range(per_step, 4 * per_step):
            check(Story(4, 5, size, (Strike(1, moment=first), Strike(2, announcement=later))))


def test_a_calm_run_of_several_workers_has_the_bits_of_one():
    check(Story(3, 5, "large", ()))
