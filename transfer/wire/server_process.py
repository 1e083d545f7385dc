"""A source's server in a process of its own, on shared memory: an engine's interpreter serves without being held.

`SourceProcess` is to its caller what a `SourceServer` and its sources are. Weights are shared, not copied: the server
process maps the same memory, read-only.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from weightwire.transfer.address import Address
from weightwire.transfer.errors import SourceError
from weightwire.transfer.problems import error_of
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.control_channel import MOST_DESCRIPTORS, Channel, Message
from weightwire.transfer.wire.limits import SourceLimits
from weightwire.transfer.wire.sockets import SocketOptions, listen
from weightwire.transfer.wire.source import Access, SourceIdentity

logger = logging.getLogger(__name__)

# A process that dies twice would die again.
_MOST_RESTARTS = 1
# Importing torch takes seconds, and minutes where a machine is short of everything.
_START_S = 120.0
_ANSWER_S = 30.0
_EXIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStats:
    """What the server process does: reads under way by rank, and the bytes of the answers that are over."""

    active_readers: Mapping[int, int]
    bytes_sent: int


class ProcessSource:
    """One rank of a `SourceProcess`; does what a `Source` does for those who publish."""

    def __init__(self, process: SourceProcess, identity: SourceIdentity) -> None:
        self.identity = identity
        self._process = process
        self._keys: list[bytes] = []
        self._access: Access | None = None
        self._published: tuple[Shells, int] | None = None

    def __str__(self) -> str:
        return f"source {self.identity.instance_id!r} rank {self.identity.rank}"

    @property
    def limits(self) -> SourceLimits:
        """As they are now, for all ranks of the process."""
        return self._process.limits

    def set_limits(self, limits: SourceLimits) -> None:
        self._process.set_limits(limits)

    def grant_access(self, access: Access) -> None:
        """Take the keys that the service gave, as `Source.grant_access` does."""
        with self._process.lock:
            if access == self._access:
                return
            self._access = access
            if access.ticket_key not in self._keys[-1:]:
                # The one before as well, whose tickets stay good, also after a restart.
                self._keys = [*self._keys[-1:], access.ticket_key]
            self._tell_access()

    def publish(self, shells: Shells, *, weight_version: int) -> None:
        """Serve sealed shells from now on, in place of what was served before.

        Shells that do not lie in shared memory are moved there, see `Shells.share`.

        Raises:
            ValueError: If the shells are not sealed.
            AdmissionError: If there is no room for them in shared memory.
            SourceError: If the server process ended for good.
        """
        if shells.manifest.total_bytes and not shells.manifest.chunk_digests:
            raise ValueError("shells have no digests: seal() comes before publish()")
        shells.share()
        with self._process.lock:
            self._published = (shells, weight_version)
            self._tell_publication()

    def withdraw(self, *, drain_s: float = 5.0) -> None:
        """Serve nothing any more. Returns when no reader is left, or after `drain_s` seconds."""
        with self._process.lock:
            self._published = None
            self._ask("withdraw", timeout_s=drain_s + _ANSWER_S, drain_s=drain_s)

    def tell_all(self) -> None:
        """Tell a new server process what the one before knew."""
        self._tell_access()
        self._tell_publication()

    def _tell_access(self) -> None:
        if self._access is not None:
            self._ask(
                "access",
                ticket_keys=[key.hex() for key in self._keys],
                read_tokens=sorted(self._access.read_token_sha256),
            )

    def _tell_publication(self) -> None:
        if self._published is None:
            return
        shells, weight_version = self._published
        shared = shells.share()
        for begin in range(0, len(shared.descriptors), MOST_DESCRIPTORS):
            self._ask("files", shared.descriptors[begin : begin + MOST_DESCRIPTORS])
        ranges = [(part.file, part.offset, part.nbytes) for part in shared.ranges]
        # In a file, since it may be longer than a line should be.
        description = os.memfd_create("weightwire-publication", os.MFD_CLOEXEC)
        with open(description, "wb") as file:
            file.write(json.dumps({"manifest": shells.manifest.text.decode(), "ranges": ranges}).encode())
            file.flush()
            self._ask("publish", [description], weight_version=weight_version)

    def _ask(
        self, word: str, descriptors: Sequence[int] = (), *, timeout_s: float = _ANSWER_S, **facts: object
    ) -> None:
        self._process.ask({"word": word, "rank": self.identity.rank, **facts}, descriptors, timeout_s=timeout_s)


class SourceProcess:
    """Serves the ranks of this process from another one. A context manager starts and stops it.

    When the server process dies, it is started again, once, on the same port and with the same weights; when it dies
    again, `failed` is set. It ends by itself when this process does, however that is.

    Attributes:
        sources: What it serves, by rank: to publish, as with a `Source`.
        failed: Set when nothing is served any more, and nobody stopped it.
        lock: Held while the two processes speak.
    """

    def __init__(
        self,
        identity: SourceIdentity,
        ranks: Iterable[int] | None = None,
        limits: SourceLimits | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: tuple[Path, Path] | None = None,
        sockets: SocketOptions | None = None,
    ) -> None:
        """Bind the port, and keep it; nobody is answered before `start`.

        Args:
            identity: Of any of the ranks.
            ranks: By default that of the identity.
            tls: PEM files with the certificate chain and its key.
            sockets: Of the connections that are accepted.

        Raises:
            SettingsError: If the address cannot be bound.
        """
        numbers = sorted((identity.rank,) if ranks is None else ranks)
        self.sources: Mapping[int, ProcessSource] = {
            rank: ProcessSource(self, replace(identity, rank=rank)) for rank in numbers
        }
        self.failed = threading.Event()
        self.lock = threading.RLock()
        self.limits = limits or SourceLimits()
        self._identity = identity
        self._tls = tls
        self._sockets = sockets or SocketOptions()
        self._listening = listen(host, port, self._sockets)
        self.address = Address(scheme="https" if tls else "http", host=host, port=self._listening.getsockname()[1])
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self._watcher = threading.Thread(target=self._watch, name="weightwire-server-process", daemon=True)

    def __enter__(self) -> SourceProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return str(self.address)

    @property
    def pid(self) -> int | None:
        """Of the server process; None while there is none."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server process, and wait until it answers.

        Raises:
            SourceError: If it does not.
        """
        try:
            with self.lock:
                self._spawn()
        except BaseException:
            self._let_go()
            raise
        self._watcher.start()

    def stop(self, *, drain_s: float = 5.0) -> None:
        """As `SourceServer.stop`: let readers finish for up to `drain_s` seconds, cut off the rest, close the port."""
        with self.lock:
            self._is_stopping = True
            if self._channel is not None and not self.failed.is_set():
                try:
                    self.ask({"word": "stop", "drain_s": drain_s}, timeout_s=drain_s + _ANSWER_S)
                except SourceError as error:
                    logger.warning("server process could not be stopped in good order: %s", error)
            self._let_go()
        if self._watcher.is_alive():
            self._watcher.join()

    def set_limits(self, limits: SourceLimits) -> None:
        """Take other limits, for all ranks; a rate at once, also for those who read already.

        Raises:
            SourceError: If the server process ended for good.
        """
        with self.lock:
            self.limits = limits
            self.ask({"word": "limits", "limits": asdict(limits)})

    def stats(self) -> ServerStats:
        """What the server process does now; nothing, while it is being started again.

        Raises:
            SourceError: If the server process ended for good.
        """
        answer = self.ask({"word": "stats"})
        readers = cast("dict[str, int]", answer.get("active_readers", {}))
        return ServerStats(
            active_readers={int(rank): count for rank, count in readers.items()},
            bytes_sent=cast(int, answer.get("bytes_sent", 0)),
        )

    def ask(self, message: Message, descriptors: Sequence[int] = (), *, timeout_s: float = _ANSWER_S) -> Message:
        """Say something to the server process, and wait for its answer.

        One that has just died is told everything when it is started again, so that is no error.

        Raises:
            SourceError: If it ended for good, does not answer, or cannot do it.
        """
        with self.lock:
            if self.failed.is_set():
                raise SourceError(f"server process of {self._identity.instance_id!r}: it ended for good")
            if self._channel is None:
                return {}
            try:
                self._channel.send(message, descriptors)
                received = self._channel.receive(timeout_s=timeout_s)
            except TimeoutError as error:
                self._kill()
                raise SourceError(f"server process: no answer to {message['word']!r} for {timeout_s:g} s") from error
            except OSError:
                received = None
            if received is None:
                return {}
            answer, _ = received
            if "problem" in answer:
                raise error_of(cast("dict[str, object]", answer["problem"]))
            return cast(Message, answer["done"])

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: a Ctrl-C at the terminal is for the process that drains.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weightwire.transfer.wire.server_child"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._channel = Channel(ours)
        start: Message = {
            "word": "start",
            "instance_id": self._identity.instance_id,
            "generation": self._identity.generation,
            "ranks": list(self.sources),
            "limits": asdict(self.limits),
            "sockets": asdict(self._sockets),
            "host": self.address.host,
            "tls": None if self._tls is None else [str(path) for path in self._tls],
            "log_level": logging.getLogger().getEffectiveLevel(),
        }
        try:
            self._channel.send(start, [self._listening.fileno()])
            started = self._channel.receive(timeout_s=_START_S)
        except OSError as error:
            raise SourceError(f"server process: did not start: {error}") from error
        if started is None:
            raise SourceError("server process: ended before it served; its log says why")

    def _watch(self) -> None:
        """Wait for the server process to end, and start it again if nobody wanted that."""
        for left in range(_MOST_RESTARTS, -1, -1):
            process = self._process
            assert process is not None
            code = process.wait()
            with self.lock:
                if self._is_stopping:
                    return
                logger.warning("server process ended with %d%s", code, "; starting it again" if left else "")
                self._close_channel()
                if left and self._restart():
                    continue
                self.failed.set()
                self._let_go()
                return

    def _restart(self) -> bool:
        try:
            self._spawn()
            for source in self.sources.values():
                source.tell_all()
        except SourceError as error:
            logger.warning("server process could not be started again: %s", error)
            return False
        return True

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _let_go(self) -> None:
        """Close the port and the channel, which ends the server process; wait until it is gone."""
        self._close_channel()
        self._listening.close()
        if self._process is not None:
            try:
                self._process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                self._kill()
                self._process.wait()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
