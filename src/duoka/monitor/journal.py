"""The journal of a run, `journal.jsonl`: strict JSON, a line for each event, and at its top what the run is.

The main worker writes it, from a thread of its own: a slow disk does not hold up training. When the main role moves,
the next main worker goes on in the same file.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from duoka.errors import JournalError
from duoka.events import Event

FILE_NAME = "journal.jsonl"
_MOST_WAITING = 1000  # lines; more are left out, and that is said
_FLUSH_S = 2.0


class Journal:
    def __init__(
        self,
        path: Path,
        run: dict[str, Any],
        standing: Callable[[], dict[str, Any]],
        is_main: Callable[[], bool],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`run` is what the first line says; `standing` (generation, workers) is added to every event."""
        self._path, self._run, self._standing = path, run, standing
        self._is_main, self._warn, self._clock = is_main, warn, clock
        self._lines: queue.Queue[str] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def see(self, event: Event) -> None:
        """Never waits: what does not fit is left out."""
        if not self._is_main():
            return
        record = {"kind": type(event).__name__.lower()} | asdict(event) | self._standing()
        try:
            self._lines.put_nowait(_as_line(record | {"time": round(self._clock(), 3)}))
        except queue.Full:
            self._complain("its disk is too slow")
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="duoka journal", daemon=True)
            self._thread.start()
            atexit.register(self.flush)

    def flush(self, deadline_s: float = _FLUSH_S) -> None:
        """Wait until everything is written, but not for ever."""
        end = time.monotonic() + deadline_s
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.002)

    def _write_all(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._append(line)
            except OSError as error:
                self._complain(error.strerror or str(error))
            finally:
                self._lines.task_done()

    def _append(self, line: str) -> None:
        """Opened for each line: there are few, and a file that was moved away or a full disk is met anew."""
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(fd).st_size == 0:
                os.write(fd, _as_line({"kind": "run"} | self._run).encode())
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def _complain(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{self._path} is not complete ({reason}); the run goes on.")


def _as_line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, separators=(", ", ": ")) + "\n"


@dataclass(frozen=True)
class Story:
    """What a journal tells: the run, and the digest at each step that was checked."""

    path: Path
    run: dict[str, Any]
    checks: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step; of a step that came twice, the later
    others: tuple[dict[str, Any], ...] = ()  # events that are no checks


def read_journal(place: Path) -> Story:
    """Of a run's directory, or of the file itself. A last line that was cut off by a kill does not count."""
    path = place / FILE_NAME if place.is_dir() else place
    try:
        lines = path.read_text().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise JournalError(
            f"{path} cannot be read: {reason}.",
            why="a run keeps its journal once replicas have been checked: check_every=100 steps, and several replicas.",
            do="give the directory of a run, like runs/20260101-120000-abcdef.",
        ) from None
    records = [_read_line(path, number, line) for number, line in enumerate(lines, 1) if line.endswith("\n")]
    if not records or records[0].get("kind") != "run":
        raise JournalError(f"{path} is no journal of a run.", why='its first line has not the kind "run".')
    checks = {record["step"]: record for record in records if record.get("kind") == "checked"}
    others = tuple(record for record in records[1:] if record.get("kind") != "checked")
    return Story(path, records[0], checks, others)


def _read_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
        is_check = isinstance(record, dict) and record.get("kind") == "checked"
        if not isinstance(record, dict) or (is_check and not _is_whole_check(record)):
            raise ValueError("it is no record")
    except ValueError as error:
        raise JournalError(f"{path}, line {number}, cannot be read: {error}.") from None
    return record


def _is_whole_check(record: dict[str, Any]) -> bool:
    return type(record.get("step")) is int and isinstance(record.get("digest"), str)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
