"""What a process and the server process that it started say to each other: lines of JSON, with descriptors beside them.

One asks, the other answers; the end of either process is the end of the channel.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import TypeAlias, cast

from weightwire.transfer.errors import SourceError

Message: TypeAlias = dict[str, object]

_PIECE_BYTES = 1 << 16
# Source: Linux, include/net/scm.h (SCM_MAX_FD) is 253.
MOST_DESCRIPTORS = 250


class Channel:
    """One end of it. Not for several threads at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unread = b""
        self._descriptors: list[int] = []

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and copies of at most `MOST_DESCRIPTORS` descriptors.

        Raises:
            OSError: If the other process is gone.
        """
        line = json.dumps(message).encode() + b"\n"
        sent = socket.send_fds(self._sock, [line], descriptors) if descriptors else 0
        self._sock.sendall(line[sent:])

    def receive(self, *, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
        """The next message, and the descriptors that came with it, which are the caller's from now on.

        Returns:
            None if the other process is gone.

        Raises:
            TimeoutError: If nothing comes in time; the channel is of no use then.
            SourceError: If it is no message.
        """
        self._sock.settimeout(timeout_s)
        while b"\n" not in self._unread:
            try:
                piece, descriptors, _, _ = socket.recv_fds(self._sock, _PIECE_BYTES, MOST_DESCRIPTORS)
            except ConnectionError:
                return None
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            self._descriptors += descriptors
            if not piece:
                return None
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise SourceError(f"server process: said {line[:80]!r}, expected an object")
        received, self._descriptors = self._descriptors, []
        return cast(Message, message), received

    def close(self) -> None:
        self._sock.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
