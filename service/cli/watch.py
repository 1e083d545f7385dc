"""`weightwire status --watch`: draws the fleet again and again, until q or Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from weightwire.service.cli.fleet import Fleet, RateMeter
from weightwire.service.cli.fleet_view import Page, fleet_lines
from weightwire.service.cli.output import print_json
from weightwire.service.cli.signals import on_signal
from weightwire.service.cli.text_columns import shorten_sentence
from weightwire.service.client.api import Json, ServiceClient
from weightwire.transfer.errors import ServiceUnreachableError


class Watch:
    """Looks at the service at an interval, until somebody has seen enough."""

    def __init__(self, client: ServiceClient, *, interval_s: float) -> None:
        self._client = client
        self._interval_s = interval_s
        self._ended, self._end = os.pipe()

    def print_lines(self) -> None:
        """One JSON object for each look.

        Raises:
            TransferError: As the client does: whoever reads JSON decides what an outage means.
        """
        with self._until_ended():
            while True:
                print_json({**self._ask(), "error": None})
                if self._wait():
                    return

    def draw(self, console: Console) -> None:
        """A live view. A service that is away for a moment is said to be, below what was seen last.

        Raises:
            TransferError: If the first look fails.
        """
        meter = RateMeter()
        answer, trouble = self._ask(), ""
        with (
            self._until_ended(),
            _keys(),
            Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
        ):
            while True:
                fleet = Fleet.of(answer["instances"], answer["transfers"], at=time.time())
                page = Page(width=console.width, live=True)
                lines = fleet_lines(fleet, meter.observe(fleet), page)
                live.update(Group(*fitted(lines, footer(trouble, page), height=console.height)), refresh=True)
                if self._wait():
                    return
                try:
                    answer, trouble = self._ask(), ""
                except ServiceUnreachableError as error:
                    trouble = str(error)

    def _ask(self) -> dict[str, list[Json]]:
        return {"instances": self._client.instances(), "transfers": self._client.transfers()}

    def _wait(self) -> bool:
        """Wait for the next look; returns True if there is to be none."""
        keyboard = [sys.stdin.fileno()] if _is_keyboard() else []
        ends_at = time.monotonic() + self._interval_s
        while (left := ends_at - time.monotonic()) > 0:
            readable = select.select([self._ended, *keyboard], [], [], left)[0]
            if self._ended in readable or (readable and os.read(keyboard[0], 1) in (b"q", b"Q", b"")):
                return True
        return False

    @contextlib.contextmanager
    def _until_ended(self) -> Iterator[None]:
        """A signal ends the waiting. The pipe is closed with the block."""
        try:
            with on_signal(lambda: os.close(self._end)):
                yield
        finally:
            with contextlib.suppress(OSError):
                os.close(self._end)
            os.close(self._ended)


def fitted(lines: list[Text], last: Text, *, height: int) -> list[Text]:
    """As many lines as a screen has room for above its last one, and how many there are beside."""
    room = height - 2
    if len(lines) > room:
        lines = [*lines[: room - 1], Text(f"… {len(lines) - room + 1} more lines", style="dim")]
    return [*lines, Text(), last]


def footer(trouble: str, page: Page) -> Text:
    """How to leave, or what is wrong."""
    return Text(shorten_sentence(trouble or "q to quit", page.width), style="red" if trouble else "dim")


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Keys are read as they are pressed, and not shown."""
    if not _is_keyboard():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _is_keyboard() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
