"""`status --watch` against a real service: drawn on a terminal, told as JSON lines, and left by key and by signal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.text import Text

from weightwire.service.cli.fleet_view import Page
from weightwire.service.cli.main import run
from weightwire.service.cli.watch import fitted, footer
from weightwire.service.server import running_service
from weightwire.service.settings import Settings

COMMAND = [sys.executable, "-m", "weightwire.service.cli", "status", "--watch"]


@pytest.fixture
def service() -> Iterator[str]:
    with running_service(Settings(port=0)) as url:
        yield url


def test_watch_as_json_is_a_line_for_each_look_until_a_signal(service: str) -> None:
    command = [*COMMAND, "--json", "--interval-s", "0.1", "--service", service]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().splitlines()
    assert looks == [{"instances": [], "transfers": [], "error": None}] * 2
    assert all(json.loads(line) == looks[0] for line in rest)
    assert process.returncode == 0


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self.shown = b""
        self._screen, theirs = pty.openpty()
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)

    def read_until(self, text: bytes) -> None:
        while text not in self.shown:
            self.shown += os.read(self._screen, 1 << 12)

    def leave(self) -> int:
        """Press a key that means nothing, and the one that ends it; returns the exit code."""
        os.write(self._screen, b"xq")
        code = self._process.wait(60)
        os.close(self._screen)
        return code


def test_watch_on_a_terminal_is_left_with_q(service: str) -> None:
    # So long an interval that only the key can end it within the test.
    watch = Terminal([*COMMAND, "--interval-s", "600", "--service", service])
    watch.read_until(b"q to quit")
    assert watch.leave() == 0
    assert b"no instance and no transfer is known" in watch.shown


def test_watch_of_a_service_that_is_not_there_fails_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--watch", "--json", "--service", "http://127.0.0.1:9"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "service_unreachable"


def test_watch_of_one_transfer_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "t", "--watch", "--json"]) == 2
    assert "--watch" in capsys.readouterr().out


def test_outage_is_told_below_what_was_seen_last() -> None:
    with running_service(Settings(port=0)) as service:
        watch = Terminal([*COMMAND, "--interval-s", "0.1", "--service", service])
        watch.read_until(b"q to quit")
    watch.read_until(b"refused")
    assert watch.leave() == 0
    assert b"no instance and no transfer is known" in watch.shown


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        pytest.param(3, ["0", "1", "2", "", "end"], id="all fit"),
        pytest.param(5, ["0", "1", "… 3 more lines", "", "end"], id="the screen is too low"),
    ],
)
def test_screen_is_filled_and_not_more(count: int, expected: list[str]) -> None:
    lines = [Text(str(number)) for number in range(count)]
    assert [line.plain for line in fitted(lines, Text("end"), height=5)] == expected


def test_footer_says_what_is_wrong_in_one_line() -> None:
    assert footer("", Page(width=80)).plain == "q to quit"
    assert len(footer("service " * 40, Page(width=80)).plain) == 80
