"""What the main worker does alone, for all: done once, by another one if it is lost, and waited for by who comes by."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from duoka.collectives.deeds import Deeds
from tests.conftest import run_workers


def write(place: Path, worker: int, name: str, seconds: float = 0.2) -> None:
    """Leaves a line when it begins and when it is done."""
    with open(place / name, "a") as file:
        file.write(f"{worker} begins\n")
        file.flush()
        time.sleep(seconds)
        file.write(f"{worker} ends\n")


def lines(place: Path, name: str) -> list[str]:
    return (place / name).read_text().splitlines()


def save_everywhere(collective, place: Path, victim: int = -1) -> list[str]:
    deeds, seen = Deeds(collective), []
    for number in range(3):
        collective.barrier()
        for name in ("one", "two", "one"):  # the same twice between two calls

            def deed(name: str = name, number: int = number) -> None:
                if number == 1 and collective.worker == victim:
                    (place / "struck").touch()
                    with open(place / name, "a") as file:
                        file.write(f"{victim} begins\n")
                    os.kill(os.getpid(), signal.SIGKILL)
                write(place, collective.worker, name, 0.05)

            deeds.do(name, deed)
            seen.append(lines(place, name)[-1])
    collective.barrier()
    return seen


def test_all_who_come_by_find_it_done_and_one_has_done_it(tmp_path):
    told = run_workers(3, 3, save_everywhere, tmp_path)
    assert set(told.results) == {0, 1, 2}
    for seen in told.results.values():
        assert len(seen) == 9 and all(line.endswith("ends") for line in seen)
    assert len(lines(tmp_path, "one")) == 12 and len(lines(tmp_path, "two")) == 6
    assert all(line.startswith("0 ") for line in lines(tmp_path, "one"))


def test_the_next_one_does_it_when_the_main_one_is_killed_in_the_middle(tmp_path):
    told = run_workers(3, 3, save_everywhere, tmp_path, 0)
    assert (tmp_path / "struck").exists() and told.outcome.lost == [(0, signal.SIGKILL)]
    assert set(told.results) == {1, 2}
    for seen in told.results.values():
        assert len(seen) == 9 and all(line.endswith("ends") for line in seen)
    assert lines(tmp_path, "one")[4:7] == ["0 begins", "1 begins", "1 ends"], "before, twice by worker 0"
    assert len(lines(tmp_path, "one")) == 13 and len(lines(tmp_path, "two")) == 6


def save_on_main(collective, place: Path) -> str:
    deeds = Deeds(collective)
    collective.barrier()
    if collective.worker == 0:
        deeds.do("mine", lambda: write(place, 0, "mine"))
    collective.barrier()
    deeds.do(f"of worker {collective.worker}", lambda: write(place, collective.worker, "own"))
    collective.barrier()
    if collective.worker == 1:
        deeds.do("never", lambda: write(place, 1, "never"))
    return "ended"


def test_nobody_waits_for_what_the_main_one_does_alone_or_never_does(tmp_path):
    told = run_workers(2, 2, save_on_main, tmp_path)
    assert told.results == {0: "ended", 1: "ended"}
    assert lines(tmp_path, "mine") == lines(tmp_path, "own") == ["0 begins", "0 ends"]
    assert not (tmp_path / "never").exists()


def save_stopped(collective, place: Path) -> list[str]:
    deeds = Deeds(collective)

    def deed() -> None:
        if collective.worker == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        write(place, collective.worker, "file", 0)

    deeds.do("file", deed)
    return lines(place, "file")


def test_a_main_one_that_is_stopped_there_is_named_killed_and_made_up_for(tmp_path):
    told = run_workers(2, 2, save_stopped, tmp_path, deadline_s=0.5)
    assert told.results == {1: ["1 begins", "1 ends"]} and told.outcome.lost == [(0, signal.SIGKILL)]
    assert any("has not done what it does alone" in line for line in told.said), told.said
