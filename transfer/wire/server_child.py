"""The process that serves in place of another: maps what that one shares, and does what it says until it ends."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import ssl
from collections.abc import Sequence
from typing import cast

from weightwire.transfer.errors import TransferError
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.problems import problem_of
from weightwire.transfer.shared_memory import FileRange, SharedFiles, open_storages
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.control_channel import Channel, Message
from weightwire.transfer.wire.limits import SourceLimits
from weightwire.transfer.wire.sockets import SocketOptions
from weightwire.transfer.wire.source import Access, Source, SourceIdentity
from weightwire.transfer.wire.source_server import SourceServer

logger = logging.getLogger(__name__)


class ServerChild:
    """A server, and what may be said to it: each method is a word of the channel, and answers it."""

    def __init__(self, start: Message, listening: socket.socket) -> None:
        ranks = cast("list[int]", start["ranks"])
        identity = SourceIdentity(
            instance_id=str(start["instance_id"]), rank=ranks[0], generation=cast(int, start["generation"])
        )
        self._sources = Source.of_ranks(identity, ranks, _limits(start["limits"]))
        sockets = SocketOptions(**cast("dict[str, int]", start["sockets"]))
        tls = None
        if start["tls"] is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(*cast("list[str]", start["tls"]))
        self._server = SourceServer(
            self._sources, host=str(start["host"]), tls=tls, listening=listening, sockets=sockets
        )
        self._server.start()
        self._files: list[int] = []
        self.is_over = False

    def obey(self, message: Message, descriptors: Sequence[int]) -> Message:
        """Do what a message says.

        Raises:
            TransferError: If it cannot be done.
            ValueError: If it makes no sense.
        """
        match message["word"]:
            case "access":
                self._access(message)
            case "files":
                self._files += descriptors
            case "publish":
                self._publish(message, descriptors[0])
            case "withdraw":
                self._source(message).withdraw(drain_s=cast(float, message["drain_s"]))
            case "limits":
                next(iter(self._sources.values())).set_limits(_limits(message["limits"]))
            case "stats":
                return self._stats()
            case "stop":
                self.stop(drain_s=cast(float, message["drain_s"]))
            case word:
                raise ValueError(f"server process: was told {word!r}, which it does not know")
        return {}

    def stop(self, *, drain_s: float) -> None:
        if not self.is_over:
            self.is_over = True
            self._server.stop(drain_s=drain_s)

    def _source(self, message: Message) -> Source:
        return self._sources[cast(int, message["rank"])]

    def _access(self, message: Message) -> None:
        for key in cast("list[str]", message["ticket_keys"]):
            self._source(message).grant_access(
                Access(
                    ticket_key=bytes.fromhex(key),
                    read_token_sha256=frozenset(cast("list[str]", message["read_tokens"])),
                )
            )

    def _publish(self, message: Message, described_in: int) -> None:
        """Map the files that came before, and serve what they hold."""
        files, self._files = self._files, []
        try:
            with open(described_in, "rb", closefd=False) as description:
                description.seek(0)
                told = json.load(description)
        finally:
            os.close(described_in)
        ranges = [FileRange(file=file, offset=offset, nbytes=nbytes) for file, offset, nbytes in told["ranges"]]
        shared = SharedFiles(files, ranges)
        shells = Shells(Manifest.from_text(told["manifest"].encode()), open_storages(shared))
        self._source(message).publish(shells, weight_version=cast(int, message["weight_version"]))

    def _stats(self) -> Message:
        return {
            "active_readers": {str(rank): source.active_readers for rank, source in self._sources.items()},
            "bytes_sent": next(iter(self._sources.values())).capacity.bytes_sent,
        }


def _limits(value: object) -> SourceLimits:
    return SourceLimits(**cast("dict[str, int]", value))


def _answer(child: ServerChild, message: Message, descriptors: Sequence[int]) -> Message:
    try:
        return {"done": child.obey(message, descriptors)}
    except TransferError as error:
        return {"problem": problem_of(error)}
    except (ValueError, KeyError, OSError) as error:
        logger.exception("server process: could not do what it was told")
        return {"problem": {"code": "source_failed", "detail": f"server process: {type(error).__name__}: {error}"}}


def main() -> None:
    # A Ctrl-C goes to all processes of a terminal; when to stop is the other one's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    # Standard input is the channel: whoever looks for a terminal there finds none.
    channel = Channel(socket.socket(fileno=os.dup(0)))
    first = channel.receive()
    if first is None:
        return
    start, (port,) = first
    logging.basicConfig(level=cast(int, start["log_level"]), format="%(levelname)s %(name)s: %(message)s")
    child = ServerChild(start, socket.socket(fileno=port))
    try:
        channel.send({"done": {}})
        while not child.is_over and (received := channel.receive()) is not None:
            channel.send(_answer(child, *received))
    except ConnectionError:
        logger.debug("server process: the process that started it is gone")
    finally:
        child.stop(drain_s=0)
        with contextlib.suppress(OSError):
            channel.close()


if __name__ == "__main__":
    main()
