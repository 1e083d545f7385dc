"""Starts the command line in processes of their own without loading torch for each; run by path, fed over a socket.

A test run starts some two hundred commands, and to import takes two seconds of each. This program imports once, and
forks. A message on its standard input, a socket, is the command; with it come three descriptors: standard output,
standard error, and a socket on which the process id and the wait status are told. What is forked is an ordinary
process, which reads its environment anew and has its own signals; only the interpreter's tidying at the very end, most
of a second with torch, is left out.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

# Both are loaded by the first client, and by the first server, that a process makes.
import anyio._backends._asyncio  # noqa: F401
import httpcore  # noqa: F401

from weightwire.service.cli.main import main

_MAX_MESSAGE_BYTES = 1 << 17


def await_birth(control: socket.socket) -> list[str]:
    """Fork for every message; returns only in the forked processes, with the arguments of their command."""
    # Nobody waits for the minders.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, *_ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            return _mind(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _mind(command: dict[str, object], stdout: int, stderr: int, line: int) -> list[str]:
    """Fork the process, and tell its id and how it ended; returns in the process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(line)
        return _become(command, stdout, stderr)
    os.close(stdout)
    os.close(stderr)
    os.write(line, f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(line, f"{status}\n".encode())
    os._exit(0)


def _become(command: dict[str, object], stdout: int, stderr: int) -> list[str]:
    arguments, environment = command["arguments"], command["environment"]
    assert isinstance(arguments, list)
    assert isinstance(environment, dict)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.environ.clear()
    os.environ.update(environment)
    return arguments


def _live(arguments: list[str]) -> int:
    """Run the command to its end, threads included; returns the exit code."""
    try:
        main(arguments)
    except SystemExit as end:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    code = _live(await_birth(socket.socket(fileno=os.dup(sys.stdin.fileno()))))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
