"""What the workers of a run share: memory and pipes, made by the supervisor before it starts them.

Nothing here has a name: memfds and pipes vanish with the last process that holds them, so nothing is
left behind whatever is killed, and two runs cannot meet.
"""

from __future__ import annotations

import fcntl
import os

from duoka.checkpoint.memory_snapshot import SnapshotMemory
from duoka.collectives.board import board_bytes
from duoka.runtime import stacks

_PIPE_BYTES = 1 << 18


class Plumbing:
    def __init__(self, num_workers: int, snapshots: SnapshotMemory | None = None) -> None:
        self.snapshots = snapshots  # that of the run: other starts of the workers have it, too
        self.board = os.memfd_create("duoka-board", os.MFD_CLOEXEC)
        os.posix_fallocate(self.board, 0, board_bytes(num_workers))
        self.arena = os.memfd_create("duoka-arena", os.MFD_CLOEXEC)
        self.chronicle = os.memfd_create("duoka-chronicle", os.MFD_CLOEXEC)
        self.parcel = os.memfd_create("duoka-parcel", os.MFD_CLOEXEC)
        self.stacks = tuple(stacks.make_file() for _ in range(num_workers))
        pipes = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(num_workers)]
        self.inboxes = tuple(pipe[0] for pipe in pipes)
        self.outboxes = tuple(pipe[1] for pipe in pipes)
        for outbox in self.outboxes:
            try:
                fcntl.fcntl(outbox, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            except OSError:
                pass  # the default of 64 KB holds 4,000 messages, which is plenty too

    def close(self) -> None:
        files = (self.board, self.arena, self.chronicle, self.parcel, *self.stacks)
        for fd in (*files, *self.inboxes, *self.outboxes):
            os.close(fd)

    def drain(self, worker: int) -> None:
        """Throw away what was said to a worker that is gone: its successor starts anew."""
        try:
            while os.read(self.inboxes[worker], _PIPE_BYTES):
                pass
        except BlockingIOError:
            pass
