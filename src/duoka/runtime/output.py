"""What the workers print: one copy of what they all say, everything in their logs."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
import time
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from duoka.errors import LaunchError

Stream = Literal["out", "err"]

LONGEST_LINE = 64 * 1024
REMEMBERED_LINES = 1000
HELD_LINES = 1000
HELD_BYTES = 4 * 1024 * 1024
# Nested progress bars move the cursor; from another worker that would overwrite lines of the main one.
_CURSOR_MOVES = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhl]")
# What absl and TensorFlow put before a message: when, and in which thread. No two workers have the same.
_LOG_PREFIX = re.compile(
    rb"[IWEF]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ (?=\S+:\d+\] )|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?=[IWEF] )"
)
_ADDRESS = re.compile(rb"\b0x[0-9a-f]+")


class Fold:
    """Shows the main worker as it is, and of the others only what the main worker did not say.

    The main worker's bytes pass at once and unchanged. A line of another worker is held for ``hold_s``: if
    the main worker has printed the same line, or prints it meanwhile, it disappears (each line of the main
    worker stands for one line of every other); if not, it is shown once, with the workers it came from. Log
    messages of C++ libraries are the same whenever they were written: see ``_key``.

    A line is never put into an unfinished one; with ``one_screen``, where both streams end on the same
    terminal, not into one of the other stream either.

    >>> fold = Fold(lambda data: print(data.decode(), end=""), lambda data: None, clock=lambda: 0.0)
    >>> for worker in (1, 2, 3):
    ...     fold.feed(worker, "out", b"loss 0.5\\nhello\\n")
    >>> fold.feed(0, "out", b"loss 0.5\\n")
    loss 0.5
    >>> fold.close()
    [w1-3] hello
    """

    def __init__(
        self,
        write_out: Callable[[bytes], None],
        write_err: Callable[[bytes], None],
        clock: Callable[[], float],
        main: int = 0,
        hold_s: float = 1.0,
        *,
        one_screen: bool = True,
    ) -> None:
        self._write: dict[Stream, Callable[[bytes], None]] = {"out": write_out, "err": write_err}
        self._clock, self._main, self._hold_s, self._one_screen = clock, main, hold_s, one_screen
        self._cutters: defaultdict[tuple[int, Stream], _LineCutter] = defaultdict(_LineCutter)
        self._spoken: dict[Stream, _Spoken] = {"out": _Spoken(), "err": _Spoken()}
        self._held = _Held()
        self._unfinished: set[Stream] = set()
        self._is_screen_unfinished = False

    def feed(self, worker: int, stream: Stream, data: bytes) -> None:
        """Take in what a worker has printed, cut anywhere."""
        if not data:
            return
        if worker == self._main:
            self._show(stream, data)
        for line in self._cutters[worker, stream].cut(data):
            self._take_line(worker, stream, line)

    def end(self, worker: int) -> None:
        """Take what a worker left unfinished as a line: it is gone, and a successor starts its own."""
        for stream in self._write:
            for line in self._cutters[worker, stream].rest():
                self._take_line(worker, stream, line)

    def announce(self, line: bytes) -> None:
        """Show a line of our own, on stderr."""
        self._show_line("err", line)

    def flush_due(self) -> None:
        """Show what has waited long enough."""
        now = self._clock()
        while (due := self._held.next_due()) is not None and due <= now:
            self._show_held(self._held.pop())

    def next_due(self) -> float | None:
        """Tell when ``flush_due`` will have something to show; None if nothing waits."""
        return self._held.next_due()

    def move_main(self, worker: int) -> None:
        """Make another worker the main one; what it had on hold is shown now, as it printed it."""
        former, self._main = self._main, worker
        if former == worker:
            return
        for stream in self._write:
            self._cutters[former, stream].rest()  # on the screen already
        for line in self._held.pop_all_of(worker):
            self._show_line(line.stream, line.text)
            self._take_line(worker, line.stream, line.text)
        for stream in self._write:
            if started := self._cutters[worker, stream].peek():
                self._show_line(stream, started, end=b"")
        # The next words of the new main worker do not continue a sentence of the former one.
        for stream in sorted(self._unfinished):
            if not self._cutters[worker, stream].peek():
                self._show(stream, b"\n")

    def close(self) -> None:
        """Show everything that is still held; the main worker's last line is left without a newline."""
        self.end(self._main)
        for worker in sorted({worker for worker, _ in self._cutters}):
            self.end(worker)
        while self._held.next_due() is not None:
            self._show_held(self._held.pop())

    def _take_line(self, worker: int, stream: Stream, line: bytes) -> None:
        spoken = self._spoken[stream]
        if spoken.take(worker, line):
            return
        if worker != self._main:
            self._held.add(worker, stream, line, self._clock() + self._hold_s)
            while self._held.is_full():
                self._show_held(self._held.pop())
            return
        spoken.say(worker, line)
        for other in self._held.withdraw(stream, line):
            spoken.take(other, line)

    def _show_held(self, line: _HeldLine) -> None:
        label = f"[{name_workers(line.workers)}]".encode()
        self._show_line(line.stream, label + b" " + line.text if line.text else label)

    def _show_line(self, stream: Stream, line: bytes, end: bytes = b"\n") -> None:
        """Show a line of its own, below whatever is unfinished."""
        is_unfinished = stream in self._unfinished or (self._one_screen and self._is_screen_unfinished)
        self._show(stream, (b"\n" if is_unfinished else b"") + line + end)

    def _show(self, stream: Stream, data: bytes) -> None:
        self._write[stream](data)
        self._is_screen_unfinished = not data.endswith(b"\n")
        if self._is_screen_unfinished:
            self._unfinished.add(stream)
        else:
            self._unfinished.discard(stream)


def name_workers(workers: Iterable[int]) -> str:
    """Name workers briefly, with ranges.

    >>> name_workers({2}), name_workers({3, 1}), name_workers({5, 1, 2, 3})
    ('w2', 'w1,w3', 'w1-3,w5')
    """
    ranges: list[list[int]] = []
    for worker in sorted(workers):
        if ranges and ranges[-1][-1] == worker - 1:
            ranges[-1] = [ranges[-1][0], worker]
        else:
            ranges.append([worker])
    return ",".join("w" + "-".join(map(str, ends)) for ends in ranges)


class _LineCutter:
    """Cuts a stream of bytes into lines of bounded length, each in its last state."""

    def __init__(self) -> None:
        self._open = bytearray()

    def cut(self, data: bytes) -> list[bytes]:
        lines: list[bytes] = []
        *finished, started = data.split(b"\n")
        for part in finished:
            self._open += part
            text = _settle(bytes(self._open))
            self._open.clear()
            lines += (text[at : at + LONGEST_LINE] for at in range(0, len(text) or 1, LONGEST_LINE))
        self._open += started
        if len(self._open) > LONGEST_LINE:
            # A closing carriage return is kept: what follows will overwrite the line.
            closing = b"\r" if self._open.endswith(b"\r") else b""
            self._open = bytearray(_settle(bytes(self._open)) + closing)
        while len(self._open) > LONGEST_LINE:
            lines.append(bytes(self._open[:LONGEST_LINE]))
            del self._open[:LONGEST_LINE]
        return lines

    def peek(self) -> bytes:
        """Give the unfinished line."""
        return bytes(self._open)

    def rest(self) -> list[bytes]:
        """Finish the unfinished line, if there is one."""
        return self.cut(b"\n") if self._open else []


def _settle(line: bytes) -> bytes:
    r"""Give the last state of a line.

    >>> _settle(b"10%\r50%\r\r")
    b'50%'
    """
    return _CURSOR_MOVES.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


class _Spoken:
    """The last lines of the main worker, and which other worker has said which of them."""

    def __init__(self) -> None:
        self._recent: deque[bytes] = deque()
        self._said: Counter[bytes] = Counter()
        self._forgotten: Counter[bytes] = Counter()
        self._taken: defaultdict[bytes, Counter[int]] = defaultdict(Counter)

    def say(self, worker: int, line: bytes) -> None:
        key = _key(line)
        self._said[key] += 1
        self._taken[key][worker] = self._said[key]
        self._recent.append(key)
        if len(self._recent) > REMEMBERED_LINES:
            self._forget(self._recent.popleft())

    def take(self, worker: int, line: bytes) -> bool:
        """Match a line with one that was said and that this worker has not matched yet."""
        key = _key(line)
        if key not in self._said:
            return False
        taken = max(self._taken[key][worker], self._forgotten[key])
        if taken >= self._said[key]:
            return False
        self._taken[key][worker] = taken + 1
        return True

    def _forget(self, key: bytes) -> None:
        self._forgotten[key] += 1
        if self._forgotten[key] == self._said[key]:
            for table in (self._said, self._forgotten, self._taken):
                del table[key]


def _key(line: bytes) -> bytes:
    """Equal for lines that say the same.

    >>> _key(b"I0000 00:00:1763434463.25    4221 service.cc:152] XLA service 0x7f3a2c initialized")
    b'I service.cc:152] XLA service 0x initialized'
    """
    if prefix := _LOG_PREFIX.match(line):
        level = line[:1] + b" " if line[:1].isalpha() else b""
        line = level + _ADDRESS.sub(b"0x", line[prefix.end() :])
    # A thousand lines of 64 KB would be a lot to remember.
    return line if len(line) <= 256 else hashlib.blake2b(line, digest_size=32).digest()


@dataclass(eq=False)
class _HeldLine:
    stream: Stream
    text: bytes
    due: float
    number: int
    workers: set[int] = field(default_factory=set)


class _Held:
    """Lines that wait, oldest first. Equal lines wait as one, unless that changes the order of a worker."""

    def __init__(self) -> None:
        self._lines: dict[int, _HeldLine] = {}
        self._equal: defaultdict[tuple[Stream, bytes], list[_HeldLine]] = defaultdict(list)
        self._last_of: dict[tuple[int, Stream], int] = {}
        self._num_bytes = self._next_number = 0

    def add(self, worker: int, stream: Stream, text: bytes, due: float) -> None:
        equal = self._equal[stream, _key(text)]
        later = bisect_right(equal, self._last_of.get((worker, stream), -1), key=lambda line: line.number)
        if later < len(equal):
            line = equal[later]
        else:
            line = _HeldLine(stream, text, due, self._next_number)
            self._next_number += 1
            self._lines[line.number] = line
            equal.append(line)
            self._num_bytes += len(text)
        line.workers.add(worker)
        self._last_of[worker, stream] = line.number

    def withdraw(self, stream: Stream, text: bytes) -> set[int]:
        """Take one such line from every worker that has one; tell which had."""
        found: set[int] = set()
        for line in list(self._equal.get((stream, _key(text)), ())):
            had = line.workers - found
            found |= had
            line.workers -= had
            if not line.workers:
                self._remove(line)
        return found

    def next_due(self) -> float | None:
        return next((line.due for line in self._lines.values()), None)

    def is_full(self) -> bool:
        return len(self._lines) > HELD_LINES or self._num_bytes > HELD_BYTES

    def pop(self) -> _HeldLine:
        line = next(iter(self._lines.values()))
        self._remove(line)
        return line

    def pop_all_of(self, worker: int) -> list[_HeldLine]:
        """Take every line of one worker; lines it shares with others stay theirs."""
        mine = [line for line in self._lines.values() if worker in line.workers]
        for line in mine:
            line.workers.remove(worker)
            if not line.workers:
                self._remove(line)
        return mine

    def _remove(self, line: _HeldLine) -> None:
        del self._lines[line.number]
        self._num_bytes -= len(line.text)
        place = line.stream, _key(line.text)
        self._equal[place].remove(line)
        if not self._equal[place]:
            del self._equal[place]


class Logs:
    """One file per worker, ``worker-<k>.log``, with every byte it printed, in order, written at once.

    A full disk never stops a run: the first failure is told to ``warn``, and later writes are tried again.
    """

    def __init__(self, directory: Path, warn: Callable[[str], None]) -> None:
        self._directory, self._warn = directory, warn
        self._files: dict[int, int] = {}
        self._has_warned = False

    def path(self, worker: int) -> Path:
        return self._directory / f"worker-{worker}.log"

    def write(self, worker: int, data: bytes) -> None:
        try:
            if worker not in self._files:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._files[worker] = os.open(self.path(worker), flags, 0o644)
            while data:
                data = data[os.write(self._files[worker], data) :]
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"{self.path(worker)} is not complete ({error.strerror}); the run goes on.")

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


@dataclass(frozen=True)
class RunDirectory:
    """Where a run keeps its files; ``note`` says why it is not where it was asked for."""

    path: Path
    note: str | None = None


def make_run_directory(
    base: Path,
    name: str | None = None,
    clock: Callable[[], float] = time.time,
    make_token: Callable[[], str] = lambda: secrets.token_hex(3),
) -> RunDirectory:
    """Make a new directory in ``base``: ``<time>-<random>``, or ``name``, ``name-2``, ...

    It belongs to this run alone, however many start at once: the one whose mkdir succeeds has it. If ``base``
    cannot be written, it is a temporary directory, with a note.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(clock()))
    try:
        base.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            wanted = f"{stamp}-{make_token()}" if name is None else name if attempt == 1 else f"{name}-{attempt}"
            try:
                (base / wanted).parent.mkdir(parents=True, exist_ok=True)
                os.mkdir(base / wanted)
                return RunDirectory(base / wanted)
            except FileExistsError:
                continue
        reason = "a thousand runs have this name"
    except OSError as error:
        reason = error.strerror or str(error)
    try:
        path = Path(tempfile.mkdtemp(prefix=f"duoka-{stamp}-"))
    except OSError as error:
        raise LaunchError(
            f"There is no place for the logs of this run: neither {base} nor a temporary directory.",
            why=f"{base}: {reason}; temporary: {error.strerror or error}.",
            do="make room, or start in a directory that can be written.",
        ) from error
    return RunDirectory(path, f"{base} cannot be written ({reason}); this run keeps its logs in {path}.")
