"""The line between a worker and its supervisor: small JSON objects over a Unix socket that has no name."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

from duoka.errors import Stopped

LARGEST_MESSAGE = 1 << 16


def make_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class SocketLink:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Never blocks for long, and never fails because the other side has gone: its end is noticed elsewhere."""
        self.try_to_send(message)

    def try_to_send(self, message: dict[str, Any]) -> bool:
        """Like `send`; False if nobody can have heard it."""
        data = json.dumps(message).encode()
        assert len(data) <= LARGEST_MESSAGE, f"a message of {len(data)} bytes: {message['kind']}"
        try:
            self._socket.send(data)
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, or None after this long. Raises Stopped when the other side has gone."""
        if not self._poll.poll(max(0, int(timeout_s * 1000 + 0.999))):
            return None
        try:
            data = self._socket.recv(LARGEST_MESSAGE)
        except ConnectionResetError:
            # The other side ended without having read all of ours. What it sent before is still there:
            # the error comes once, and in front of it.
            data = self._socket.recv(LARGEST_MESSAGE)
        except OSError:
            data = b""
        if not data:
            raise Stopped("the other end of the line is gone")
        message = json.loads(data)
        assert isinstance(message, dict)
        return message

    def close(self) -> None:
        self._socket.close()

    def forget(self) -> None:
        """Like `close`, in a child that has closed the descriptor already: its number may be in use again."""
        self._socket.detach()
