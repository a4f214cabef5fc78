"""One worker does something first, and the others wait until it has said how that went."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from duoka.collectives.collective import Collective
from duoka.errors import CheckpointDamaged, CheckpointError, CheckpointOfOtherVersion, DuokaError, WorkerFailed

_LONGEST_PART = 1200  # in bytes: three of them travel in one note
_FAILED, _DONE = b"!", b"."
_LONGEST_WAIT_S = 7 * 24 * 3600.0


class Turn:
    """The turn of the worker that runs replica 0, the main one.

    When it is lost before it is done, replica 0 moves, and with it the turn: somebody else does it.
    """

    def __init__(self, collective: Collective, name: str, deadline_s: float) -> None:
        self._deadline_s = min(float(deadline_s), _LONGEST_WAIT_S)
        self._collective = collective
        self._name = name
        # A replacement worker that has not joined has no turn, and waits for nobody's.
        self._is_left_out = collective.joining is not None and collective.joining.is_arriving
        self._exchange = collective.exchange([], name)
        self.word = b""  # what the one who acts leaves for the others, up to 1000 bytes

    def is_mine(self) -> bool:
        """True: this worker acts now, inside `acting`. False: another one has; its failure is raised here."""
        while not self._is_left_out and 0 not in self._exchange.missing:
            for replica in self._exchange.missing:
                self._exchange.deposit(replica)
            if self._exchange.commit(self._deadline_s):
                mark, rest = self._exchange.notes[0][:1], self._exchange.notes[0][1:]
                if mark == _FAILED:
                    self._raise_failure(rest)
                self.word = rest
                return False
        return not self._is_left_out

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Do it here. An error reaches the others, and is raised here as it is."""
        try:
            yield
        except Exception as error:
            self._finish(_FAILED + _write_failure(error))
            raise
        self._finish(_DONE + self.word)

    def _finish(self, note: bytes) -> None:
        while missing := self._exchange.missing:
            for replica in missing:
                self._exchange.deposit(replica, note if replica == 0 else b"")
            self._exchange.commit(self._deadline_s)

    def _raise_failure(self, note: bytes) -> None:
        kind, what, why, do = json.loads(note)
        for error in (CheckpointError, CheckpointDamaged, CheckpointOfOtherVersion):
            if kind == error.__name__:
                raise error(what, why=why, do=do)
        raise WorkerFailed(
            f"The main worker failed in {self._name}, for which this one waited: {kind}: {what}", why=why, do=do
        )


def _write_failure(error: Exception) -> bytes:
    """What the others are told, in as many bytes as a note has room for."""
    where = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-3:])).rstrip()
    parts = (error.what, error.why, error.do) if isinstance(error, DuokaError) else (str(error), where, "")
    for longest in (_LONGEST_PART, _LONGEST_PART // 6):  # JSON may need six bytes for one
        note = json.dumps([type(error).__name__, *(_shorten(part, longest) for part in parts)], ensure_ascii=False)
        if len(note.encode()) <= 3 * _LONGEST_PART:
            break
    return note.encode()


def _shorten(text: str, longest: int) -> str:
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= longest else data[:longest].decode(errors="ignore") + "..."
