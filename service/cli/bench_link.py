"""A link with faults, between a source of the bench and whoever reads it: it knows bytes, and nothing of HTTP."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

_PIECE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """What a link does to what it carries to the reader; 0 is never.

    Attributes:
        flip_every_bytes: One bit is turned over in every so many bytes.
        cut_after_bytes: The connection that carries this byte ends behind it, in the middle of an answer; once.
        bytes_per_s: Rate of all connections together.
    """

    flip_every_bytes: int = 0
    cut_after_bytes: int = 0
    bytes_per_s: float = 0.0

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> LinkFaults:
        return cls(**json.loads(text))


class FaultyLink:
    """Listens on loopback, and carries each connection to `upstream_port`. A context manager.

    Attributes:
        url: Where to connect in place of the source.
    """

    def __init__(self, faults: LinkFaults, *, upstream_port: int) -> None:
        self._faults = faults
        self._upstream_port = upstream_port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._carried = 0
        self._free_at = time.monotonic()

        self._thread = threading.Thread(target=self._accept, name="weightwire-bench-link", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Accept nobody any more; connections end with either of their ends."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        # The listener is shut down at the end; a source that is gone is the reader's affair.
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                source = socket.create_connection(("127.0.0.1", self._upstream_port))
                for end in (reader, source):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for carry, origin, destination in ((self._ask, reader, source), (self._answer, source, reader)):
                    threading.Thread(target=carry, args=(origin, destination), daemon=True).start()

    def _ask(self, reader: socket.socket, source: socket.socket) -> None:
        """Carry requests, as they are."""
        with contextlib.suppress(OSError):
            while piece := reader.recv(_PIECE_BYTES):
                source.sendall(piece)
        with contextlib.suppress(OSError):
            source.shutdown(socket.SHUT_WR)

    def _answer(self, source: socket.socket, reader: socket.socket) -> None:
        """Carry answers, with the faults; at the end both sides are closed."""
        with source, reader:
            with contextlib.suppress(OSError):
                self._carry_answers(source, reader)
            for end in (source, reader):
                # Closing alone would not end a connection that another thread waits at.
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _carry_answers(self, source: socket.socket, reader: socket.socket) -> None:
        """Until the source ends, or the link is cut."""
        buffer = memoryview(bytearray(_PIECE_BYTES))
        while count := source.recv_into(buffer):
            begin = self._take_place(count)
            piece = buffer[: self._kept(begin, count)]
            self._damage(piece, begin)
            reader.sendall(piece)
            if len(piece) < count:
                return

    def _take_place(self, count: int) -> int:
        """The number of the first of `count` bytes, once they may go: connections take turns at the rate."""
        with self._lock:
            begin = self._carried
            self._carried += count
            now = time.monotonic()
            goes_at = max(now, self._free_at)
            if self._faults.bytes_per_s:
                self._free_at = goes_at + count / self._faults.bytes_per_s
        if goes_at > now:
            time.sleep(goes_at - now)
        return begin

    def _kept(self, begin: int, count: int) -> int:
        """How many of these bytes get through."""
        end = self._faults.cut_after_bytes
        return end - begin if begin < end <= begin + count else count

    def _damage(self, piece: memoryview, begin: int) -> None:
        every = self._faults.flip_every_bytes
        if not every:
            return
        for at in range(-begin % every, len(piece), every):
            # Not the first bytes of an answer, which are no chunk of anybody's.
            if begin + at:
                piece[at] ^= 1
