"""Arrival, told through the kernel: one pipe per worker, into which all others write short messages.

A message travels through the kernel, so whatever its sender wrote to shared memory before is visible
to its receiver afterwards, on every processor. Receivers sleep in poll(); nobody polls plain memory.
"""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_MESSAGE = struct.Struct("<HxxIQ")
WAKE = 0xFFFF  # the sender of a message that only says: look at your link to the supervisor


class Message(NamedTuple):
    sender: int
    generation: int
    progress: int


def wake(outbox: int) -> None:
    """Make the reader of this pipe look at its link; used by the supervisor."""
    _write(outbox, _MESSAGE.pack(WAKE, 0, 0))


class Mailbox:
    def __init__(self, inbox: int, outboxes: Mapping[int, int]) -> None:
        self._inbox = inbox
        self._outboxes = dict(outboxes)
        self._poll = select.poll()
        self._poll.register(inbox, select.POLLIN)

    def send(self, receivers: Iterable[int], message: Message) -> None:
        data = _MESSAGE.pack(*message)
        for receiver in receivers:
            _write(self._outboxes[receiver], data)

    def receive(self, timeout_s: float) -> list[Message]:
        """What has come, waiting for at most this long for something to come."""
        if not self._poll.poll(max(0, int(timeout_s * 1000 + 0.999))):
            return []
        data = os.read(self._inbox, 1 << 16)
        return [Message(*fields) for fields in _MESSAGE.iter_unpack(data)]


def _write(fd: int, data: bytes) -> None:
    try:
        os.write(fd, data)
    except BlockingIOError:
        # A full pipe means thousands of unread messages: its reader is gone for good, and the
        # supervisor deals with that. Blocking here would only hang us too.
        pass
