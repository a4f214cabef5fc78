"""Contestants in processes of their own: each has its own backend, threads and devices.

They stay alive between rounds and sleep on a socket until their turn, so one run measures all of them in rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SOCKET = "KERAS_CONTEST_SOCKET"
START_S, ANSWER_S, END_S = 180, 240, 20


class NoAnswer(Exception):
    """A contestant has ended, or was silent for too long."""


class Contest:
    """Starts contestants, asks them in turn, and ends them. Use it in a `with` block."""

    def __enter__(self) -> Contest:
        self._directory = tempfile.TemporaryDirectory()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._directory.name}/socket")
        self._listener.listen()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lines: dict[str, list[Any]] = {}
        self._expected = 0
        return self

    def start(self, name: str, words: Sequence[str], environ: dict[str, str], num_workers: int = 1) -> None:
        """Start `python words...`, which calls `serve` in so many processes."""
        mine = {SOCKET: f"{self._directory.name}/socket\n{name}", "TF_CPP_MIN_LOG_LEVEL": "3"}
        with open(self._log(name), "wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *words],
                env=os.environ | mine | environ,
                cwd=self._directory.name,
                stdout=log,
                stderr=log,
            )
        self._lines[name] = []
        self._expected += num_workers

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        while sum(map(len, self._lines.values())) < self._expected:
            self._check_alive()
            self._listener.settimeout(1)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() > end:
                    raise SystemExit(f"not all contestants were ready after {START_S} s") from None
                continue
            connection.settimeout(ANSWER_S)
            lines = connection.makefile("rw")
            self._lines[lines.readline().strip()].append(lines)

    def ask(self, names: Sequence[str], **request: Any) -> dict[str, list[Any]]:
        """The answers of these, each a list with one for each of its processes. They work at the same time."""
        for name in names:
            for lines in self._lines[name]:
                with contextlib.suppress(OSError):  # it has ended: reading reports that
                    lines.write(json.dumps(request) + "\n")
                    lines.flush()
        answers: dict[str, list[Any]] = {}
        missing: list[NoAnswer] = []
        for name in names:
            try:
                answers[name] = [self._read(name, lines) for lines in self._lines[name]]
            except NoAnswer as error:
                missing.append(error)  # raised when the answers of all others are read
        if missing:
            raise missing[0]
        return answers

    def _read(self, name: str, lines: Any) -> Any:
        try:
            text = lines.readline()
        except OSError:  # TimeoutError, and any read after it
            text = ""
        if not text:
            raise NoAnswer(f"{name} gave no answer:\n{self._log(name).read_text(errors='replace')[-3000:]}")
        return json.loads(text)

    def _check_alive(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise SystemExit(f"{name} has ended:\n{self._log(name).read_text(errors='replace')[-3000:]}")

    def _log(self, name: str) -> Path:
        return Path(self._directory.name) / f"{name.replace(' ', '-').replace(',', '')}.log"

    def __exit__(self, *exception: object) -> None:
        for connections in self._lines.values():
            for lines in connections:
                try:
                    lines.close()
                except OSError:
                    pass
        self._listener.close()
        end = time.monotonic() + END_S
        for process in self._processes.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(END_S)
        self._directory.cleanup()


def read_steal() -> tuple[int, int]:
    """Ticks of all cores since the machine was started: those that the hypervisor took, and all."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return ticks[7], sum(ticks)


def say_steal(begin: tuple[int, int]) -> str:
    taken, ticks = (after - before for before, after in zip(begin, read_steal(), strict=True))
    return f"the hypervisor took {100 * taken / max(1, ticks):.0f} % of the time"


def serve(answer: Callable[..., Any]) -> None:
    """In a contestant: answer requests until there are no more."""
    path, name = os.environ[SOCKET].split("\n")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    lines = connection.makefile("rw")
    lines.write(name + "\n")
    lines.flush()
    for line in lines:
        lines.write(json.dumps(answer(**json.loads(line))) + "\n")
        lines.flush()
