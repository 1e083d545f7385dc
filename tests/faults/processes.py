"""Commands as processes: started, listened to, and ended by their own handles."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import pytest

Json: TypeAlias = dict[str, object]

# Nothing that is waited for takes so long; a process that hangs fails the test with its log.
PATIENCE_S = 60.0
_NURSERY = Path(__file__).with_name("nursery.py")


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment of this process without variables of ours, and `variables`."""
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith("WEIGHTWIRE_")}
    return inherited | variables


def wait_until(true: Callable[[], bool]) -> None:
    """Ask again and again until it is so; a test that waits for what never comes fails."""
    ends_at = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > ends_at:
            pytest.fail(f"it did not come true within {PATIENCE_S:g} s")
        threading.Event().wait(0.02)


class Handle(Protocol):
    """What a process is ended by."""

    pid: int

    def send_signal(self, number: int) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Nursling:
    """A process that the nursery forked; as much of `subprocess.Popen` as is needed here."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._line.settimeout(PATIENCE_S)
        self._told = line.makefile("r")
        self.pid = int(self._told.readline())
        self._returncode: int | None = None
        try:
            self._pidfd: int | None = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._pidfd = None

    def send_signal(self, number: int) -> None:
        """Signal this very process, whoever may have its number by now."""
        if self._pidfd is not None and self._returncode is None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                return

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; minus the signal's number if one ended it."""
        if self._returncode is None:
            self._line.settimeout(timeout)
            self._returncode = os.waitstatus_to_exitcode(int(self._told.readline()))
            self._told.close()
            self._line.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
        return self._returncode


class Nursery:
    """A process that forks commands on demand."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, str(_NURSERY)], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=clean_environment()
        )
        theirs.close()

    def start(self, arguments: list[str], *, stdout: int, stderr: int, env: Mapping[str, str]) -> Nursling:
        ours, theirs = socket.socketpair()
        message = json.dumps({"arguments": arguments, "environment": dict(env)}).encode()
        with theirs:
            socket.send_fds(self._control, [message], [stdout, stderr, theirs.fileno()])
        return Nursling(ours)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a one-shot command ended.

    Attributes:
        lines: Every line that it wrote on standard output.
        log: What it wrote on standard error.
    """

    code: int
    lines: list[str]
    log: str

    @property
    def answer(self) -> Json:
        """The one JSON object."""
        assert len(self.lines) == 1, f"expected one line on stdout, found {self.lines}; log: {self.log}"
        answer = json.loads(self.lines[0])
        assert isinstance(answer, dict)
        return answer

    @property
    def error(self) -> Json:
        error = self.answer["error"]
        assert isinstance(error, dict), f"expected an error, found {self.answer}"
        return error

    def check(self, code: int) -> Json:
        """The answer, once the exit code is known to be `code`."""
        assert self.code == code, f"exit code {self.code}, expected {code}: {self.lines} {self.log}"
        return self.answer


class Running:
    """A command that runs, with its standard output at hand."""

    def __init__(self, handle: Handle, stdout: int, log: Path) -> None:
        self._handle = handle
        self._stdout = stdout
        self._log = log
        self._unread = b""
        self._closed = False

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def line(self) -> Json:
        """The next line of standard output, waited for, as JSON."""
        for line in self._lines():
            answer = json.loads(line)
            assert isinstance(answer, dict)
            return answer
        pytest.fail(f"it ended with {self.wait()} and without a line on stdout: {self.log}")

    def send_signal(self, number: int) -> None:
        self._handle.send_signal(number)

    def wait(self) -> int:
        return self._handle.wait(PATIENCE_S)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.send_signal(signal.SIGTERM)
        return self.wait()

    def finish(self) -> Outcome:
        """Wait for the end."""
        lines = list(self._lines())
        return Outcome(code=self.wait(), lines=lines, log=self.log)

    def close(self) -> None:
        """End it, however it is, and let go of it."""
        self.kill()
        if not self._closed:
            self._closed = True
            os.close(self._stdout)

    def _lines(self) -> Iterator[str]:
        ends_at = time.monotonic() + PATIENCE_S
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                yield line.decode()
                continue
            if not select.select([self._stdout], [], [], max(0.0, ends_at - time.monotonic()))[0]:
                pytest.fail(f"nothing on stdout for {PATIENCE_S:g} s: {self.log}")
            piece = os.read(self._stdout, 1 << 16)
            if not piece:
                return
            self._unread += piece


class Lab:
    """A service, sources and targets as processes of this machine; whatever still runs at the end is killed.

    Attributes:
        service: URL of the newest service that was started.
        model: Model id that sources and targets get.
    """

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.service = ""
        self.model = "org/model"
        self._nursery = nursery
        self._folder = folder
        self._running: list[Running] = []

    def start(self, *arguments: object, env: Mapping[str, str] | None = None, fresh: bool = False) -> Running:
        """Start a command.

        Args:
            arguments: As on the command line, without the program.
            env: Variables beside the inherited ones.
            fresh: Start it with `python -m`, in place of a fork of a process that has imported everything.
        """
        words = [str(argument) for argument in arguments]
        log = self._folder / f"{len(self._running):02}-{words[0] if words else 'none'}.log"
        ours, theirs = os.pipe()
        environment = clean_environment(**(env or {}))
        with log.open("wb") as stderr:
            if fresh:
                program = [sys.executable, "-m", "weightwire.service.cli", *words]
                handle: Handle = subprocess.Popen(
                    program, stdin=subprocess.DEVNULL, stdout=theirs, stderr=stderr, env=environment
                )
            else:
                handle = self._nursery.start(words, stdout=theirs, stderr=stderr.fileno(), env=environment)
        os.close(theirs)
        running = Running(handle, ours, log)
        self._running.append(running)
        return running

    def run(self, *arguments: object, env: Mapping[str, str] | None = None, fresh: bool = False) -> Outcome:
        """Run a command to its end."""
        return self.start(*arguments, env=env, fresh=fresh).finish()

    def serve(self, *flags: object, env: Mapping[str, str] | None = None) -> Running:
        """Start a service, and wait until it is ready."""
        port = () if "--port" in flags else ("--port", 0)
        running = self.start("serve", "--json", *port, *flags, env=env)
        self.service = str(running.line()["url"])
        return running

    def source(self, checkpoint: Path, *flags: object, env: Mapping[str, str] | None = None) -> Running:
        """Start a source, without waiting for it: its ready line is `line()`."""
        return self.start("source", checkpoint, *self.common(), *flags, env=env)

    def ready_source(self, checkpoint: Path, *flags: object) -> Running:
        """Start a source, and wait until it serves."""
        running = self.source(checkpoint, *flags)
        line = running.line()
        assert line.get("ready") is True, f"{line} {running.log}"
        return running

    def pull(self, *flags: object, env: Mapping[str, str] | None = None) -> Running:
        """Start a target."""
        return self.start("pull", *self.common(), *flags, env=env)

    def status(self, transfer_id: object) -> Json:
        """What the service says of a transfer."""
        outcome = self.run("status", str(transfer_id), "--service", self.service, "--json")
        assert outcome.code == 0, outcome.lines
        return outcome.answer

    def close(self) -> None:
        for running in reversed(self._running):
            running.close()

    def common(self) -> tuple[str, ...]:
        """Flags that sources and targets have in common."""
        return ("--service", self.service, "--model", self.model, "--json")
