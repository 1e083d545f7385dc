"""An HTTP proxy as companies have them: it passes on plain http, tunnels https, and may want to know who asks."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import BinaryIO, Self
from urllib.parse import urlsplit


class ForwardProxy:
    """Serves on 127.0.0.1 until its block ends.

    Attributes:
        url: What clients are told.
        refusal: A status line that is answered to whatever is asked; None lets it through.
        wanted: Value of `Proxy-Authorization` without which the answer is 407.
        asked: The first line of every request that came.
        heard: Every byte that clients sent.
    """

    def __init__(self, *, refusal: str | None = None, wanted: str | None = None) -> None:
        self.refusal = refusal
        self.wanted = wanted
        self.asked: list[str] = []
        self.heard = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def _spawn(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with self._lock:
                    self._open.add(client)
                self._spawn(lambda client=client: self._serve(client))  # type: ignore[misc]

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as requests, contextlib.suppress(OSError):
            try:
                self._relay(client, requests)
            finally:
                with self._lock:
                    self._open.discard(client)

    def _relay(self, client: socket.socket, requests: BinaryIO) -> None:
        """Look at the first request of a connection, and pass everything on to where that leads."""
        first, fields = self._read_head(requests)
        if not first:
            # Connected, and thought better of it.
            return
        refusal = self.refusal
        if self.wanted is not None and f"Proxy-Authorization: {self.wanted}" not in fields:
            refusal = "407 Proxy Authentication Required"
        if refusal is not None:
            client.sendall(f"HTTP/1.1 {refusal}\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n".encode())
            return
        method, target, _ = first.split(" ")
        place = urlsplit(target if "://" in target else f"//{target}")
        with socket.create_connection((str(place.hostname), int(place.port or 80))) as upstream:
            with self._lock:
                self._open.add(upstream)
            self._spawn(lambda: self._pass_back(upstream, client))
            try:
                if method == "CONNECT":
                    client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    while piece := client.recv(1 << 18):
                        self._note(piece)
                        upstream.sendall(piece)
                while method != "CONNECT" and first:
                    upstream.sendall(self._in_origin_form(first, fields) + self._read_body(requests, fields))
                    first, fields = self._read_head(requests)
            finally:
                with self._lock:
                    self._open.discard(upstream)
                # To close it would not wake the thread that reads from it.
                upstream.shutdown(socket.SHUT_RDWR)

    def _read_head(self, requests: BinaryIO) -> tuple[str, list[str]]:
        head = b""
        while (line := requests.readline()) not in (b"\r\n", b""):
            head += line
        self._note(head)
        first, *fields = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        if first:
            self.asked.append(first.removesuffix(" HTTP/1.1"))
        return first, fields

    def _read_body(self, requests: BinaryIO, fields: list[str]) -> bytes:
        lengths = [int(field.partition(":")[2]) for field in fields if field.lower().startswith("content-length:")]
        body = requests.read(lengths[0]) if lengths else b""
        self._note(body)
        return body

    @staticmethod
    def _in_origin_form(first: str, fields: list[str]) -> bytes:
        method, target, version = first.split(" ")
        parts = urlsplit(target)
        path = parts._replace(scheme="", netloc="").geturl()
        kept = [field for field in fields if not field.lower().startswith("proxy-")]
        return "\r\n".join([f"{method} {path} {version}", *kept, "", ""]).encode("latin-1")

    @staticmethod
    def _pass_back(upstream: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := upstream.recv(1 << 18):
                client.sendall(piece)
            client.shutdown(socket.SHUT_WR)

    def _note(self, piece: bytes) -> None:
        with self._lock:
            self.heard += piece
