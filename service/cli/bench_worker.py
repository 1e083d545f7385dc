"""Processes of a bench: told things on their standard input, heard on their standard output, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeAlias

from weightwire.transfer.errors import SourceUnreachableError

Json: TypeAlias = dict[str, object]
# Some processes that load torch at the same time, on few cores, take a while.
START_TIMEOUT_S = 120.0


class Worker:
    """A process that ends with the block; what it says is read by a thread, so that it never waits for its reader.

    Attributes:
        name: What errors call it.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, lines: queue.Queue[tuple[str, Json | None]] | None = None
    ) -> None:
        """Start it.

        Args:
            name: What errors, and `lines`, call it.
            command: The program and its arguments.
            lines: Takes what it says, and at its end None; by default a queue of its own, which `hear` reads.
        """
        self.name = name
        self._lines = queue.Queue[tuple[str, Json | None]]() if lines is None else lines
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, name=f"weightwire-bench-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        """Send it a line; one that has ended hears nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def hear(self, *, timeout_s: float = START_TIMEOUT_S) -> Json:
        """The next thing that it says.

        Raises:
            SourceUnreachableError: If it says nothing any more.
        """
        try:
            _, line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise SourceUnreachableError(f"bench: {self.name} said nothing for {timeout_s:g} s") from None
        if line is None:
            raise SourceUnreachableError(f"bench: {self.name} ended with exit code {self._process.wait()}")
        return line

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        """Let it end by itself, or make it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        # One that was stopped can neither end nor be terminated.
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._lines.put((self.name, json.loads(line)))
        self._lines.put((self.name, None))
