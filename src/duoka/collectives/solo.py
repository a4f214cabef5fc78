"""One worker that runs all replicas: the same sums in the same order, with nobody to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duoka.collectives.arena import Arena
from duoka.collectives.board import Board, board_bytes
from duoka.collectives.meeting import Meeting
from duoka.collectives.shm import SharedMemory
from duoka.topology.membership import Membership


class _Nobody:
    """The mailbox and the link of a worker that is alone."""

    def send(self, *_: Any) -> None:
        pass

    def receive(self, timeout_s: float) -> Any:
        return []


def solo(num_replicas: int, *, available_bytes: Callable[[], int], deadline_s: float = 60.0) -> SharedMemory:
    """A collective for one process, which runs every replica in turn."""
    nobody: Any = _Nobody()
    meeting = Meeting(0, Membership(0, (0,)), nobody, Board(bytearray(board_bytes(1))), nobody)
    return SharedMemory(meeting, Arena(None, available_bytes=available_bytes), num_replicas, deadline_s=deadline_s)
