"""Scripts run as users run them: real interpreters, real workers. Every run ends with a look at what it left behind."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.abandoned import list_abandoned
from tests.limits import START_S

PYTHON = (sys.executable,)
DUOKA_RUN = (sys.executable, "-m", "duoka", "run")
_MARK = "DUOKA_TEST_MARK"


def write(directory: Path, source: str, name: str = "script.py") -> Path:
    """Put a script into a directory of its own below `directory`; runs start there."""
    path = directory / "work" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


@dataclass(frozen=True)
class Ended:
    """How a run ended, and what could be seen of it."""

    code: int
    out: str
    err: str
    directory: Path

    @property
    def run_directory(self) -> Path:
        (only,) = (self.directory / "runs").iterdir()
        return only

    def logs(self) -> list[str]:
        return [path.read_text() for path in self.run_directory.glob("worker-*.log")]

    def log(self, worker: int) -> str:
        return (self.run_directory / f"worker-{worker}.log").read_text()

    def said(self) -> list[str]:
        """What Duoka itself had to say, without its first lines on devices and replicas."""
        lines = [line.removeprefix("duoka: ") for line in self.err.splitlines() if line.startswith("duoka: ")]
        return [line for line in lines if "virtual CPU devices" not in line and "; logs in " not in line]

    def facts(self) -> dict[int, dict[str, Any]]:
        """What each worker printed as JSON, on a line that begins with a brace."""
        found = {}
        for path in self.run_directory.glob("worker-*.log"):
            lines = [line for line in path.read_text().splitlines() if line.startswith("{")]
            if lines:
                found[int(path.stem.removeprefix("worker-"))] = json.loads(lines[-1])
        return found


class Run:
    """A run going on. Its processes carry a mark in their environment, which children inherit."""

    def __init__(
        self, directory: Path, words: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        self.directory = directory / "work"
        self._mark = uuid.uuid4().hex
        self._screen = directory / f"screen-{self._mark}"
        for path in (self.directory, self._screen):
            path.mkdir(parents=True, exist_ok=True)
        self.temporary = make_temporary()
        self._before = self._files(), set(list_abandoned())
        environ = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST", "OMP_"))}
        environ |= {_MARK: self._mark, "TMPDIR": str(self.temporary), "PYTHONDONTWRITEBYTECODE": "1"}
        with open(self._screen / "out", "wb") as out, open(self._screen / "err", "wb") as err:
            given = {"stdout": out, "stderr": err, "stdin": subprocess.DEVNULL, "cwd": self.directory} | options
            self.process = subprocess.Popen(list(words), env=environ | dict(env or {}), **given)
        atexit.register(self.end)  # a test that has failed half-way leaves nothing running either

    @property
    def out(self) -> str:
        return (self._screen / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self._screen / "err").read_text(errors="replace")

    def alive(self) -> dict[int, dict[str, str]]:
        """The living processes of this run, with the environment each was started with."""
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    words = Path(f"/proc/{entry}/environ").read_bytes().decode(errors="replace").split("\0")
                except OSError:
                    continue
                environ = dict(word.split("=", 1) for word in words if "=" in word)
                if environ.get(_MARK) == self._mark:
                    found[int(entry)] = environ
        return found

    def workers(self) -> dict[int, int]:
        """Process ids by worker, as the supervisor (which is the process we started) told its children."""
        found = {}
        for pid, environ in self.children().items():
            if "DUOKA_WORKER" in environ:
                found[int(json.loads(environ["DUOKA_WORKER"])["worker"])] = pid
        return found

    def children(self) -> dict[int, dict[str, str]]:
        return {pid: environ for pid, environ in self.alive().items() if _parent(pid) == self.process.pid}

    def wait_for(self, text: str, times: int = 1, timeout_s: float = START_S) -> None:
        """Until this has been printed so many times."""
        wait_until(
            lambda: (self.out + self.err).count(text) >= times or self.process.poll() is not None, timeout_s, self
        )
        assert (self.out + self.err).count(text) >= times, f"{text!r} did not come:\n{self.out}\n{self.err}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def finish(self, timeout_s: float = START_S, leaves: Sequence[str] | Callable[[], Sequence[str]] = ()) -> Ended:
        """Wait for the end, and see that nothing but `runs/` and the named temporary files is left; those go now.

        What may be left can depend on what happened: then it is asked for at the end.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            shown = f"alive: {list(self.alive())}\n{self.out[-3000:]}\n{self.err[-3000:]}"
            self.end()
            raise AssertionError(f"the run has not ended after {timeout_s} s:\n{shown}") from None
        wait_until(lambda: not self.alive(), START_S, self)  # what was just killed may need a moment to go
        self.check_files(leaves() if callable(leaves) else leaves)
        self.end()
        return Ended(code, self.out, self.err, self.directory)

    def wait_until_all_are_gone(self, timeout_s: float = START_S) -> None:
        """For a run whose supervisor is dead."""
        try:
            wait_until(lambda: not self.alive(), timeout_s, self)
        except AssertionError:
            self.end()
            raise
        self.process.wait(timeout_s)

    def check_files(self, leaves: Sequence[str] = ()) -> None:
        files, shared = self._before
        new = sorted(path for path in self._files() - files if path.split("/")[0] != "runs")
        assert new == [], f"left behind: {new}"
        temporary = [path.name for path in self.temporary.iterdir()]
        left = [name for name in temporary if not name.startswith(tuple(leaves))]
        assert left == [], f"left behind: {left}"
        wait_until(lambda: set(list_abandoned()) <= shared, START_S, self)

    def end(self) -> None:
        """Kill every process of this run, if there are any."""
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(START_S)
        shutil.rmtree(self.temporary, ignore_errors=True)
        atexit.unregister(self.end)

    def _files(self) -> set[str]:
        return {str(path.relative_to(self.directory)) for path in self.directory.rglob("*")}


def make_temporary() -> Path:
    """For the temporary files of one run: with a short name, because Unix sockets are made in it.

    Tests that are killed cannot remove theirs; whoever comes next does, by the process id in the name.
    """
    place = Path(tempfile.gettempdir())
    for left in place.glob("duoka-test-*-*"):
        pid = left.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"duoka-test-{os.getpid()}-"))


def start(directory: Path, source: str, *words: str, program: Sequence[str] = PYTHON, **options: Any) -> Run:
    """Start `program script.py words...`. Options of the program stand in `program`."""
    write(directory, source)
    return Run(directory, [*program, "script.py", *words], **options)


def run(
    directory: Path, source: str, *words: str, timeout_s: float = START_S, leaves: Sequence[str] = (), **options: Any
) -> Ended:
    return start(directory, source, *words, **options).finish(timeout_s, leaves)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def wait_until(is_so: Callable[[], bool], timeout_s: float, run: Run) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, f"not within {timeout_s} s:\n{run.alive().keys()}\n{run.out}\n{run.err}"
        time.sleep(0.02)
