"""What the commands print: JSON for programs on stdout, tables and progress for people, logs on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from weightwire.service.cli.exit_codes import code_for
from weightwire.transfer.diagnostics import advice, diagnostic_of
from weightwire.transfer.errors import SettingsError, TransferError
from weightwire.transfer.problems import listed_facts
from weightwire.transfer.session import RankProgress, TransferState

stdout = Console()
stderr = Console(stderr=True)

_LEVELS = ("debug", "info", "warning", "error")


def print_json(value: object) -> None:
    """One JSON object on one line, flushed."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def start_logging(level: str) -> None:
    """Raises:
    SettingsError: If `level` is not one of ours.
    """
    if level.lower() not in _LEVELS:
        raise SettingsError(f"--log-level {level!r}: expected one of {', '.join(_LEVELS)}")
    handler = RichHandler(console=stderr, show_path=False, rich_tracebacks=False)
    logging.basicConfig(level=level.upper(), handlers=[handler], format="%(message)s", force=True)
    # They say again what our own lines say.
    for chatty in ("httpx", "httpcore", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def error_json(error: TransferError) -> dict[str, object]:
    """The `error` member of a command's JSON: code, detail, and the facts that the error carries, long lists cut."""
    return {**listed_facts(error), "code": error.code, "detail": str(error)}


def print_error(error: TransferError) -> None:
    # Terminals break lines at words; a log file keeps each as one, so that it can be searched.
    soft_wrap = not stderr.is_terminal
    stderr.print(f"[bold red]error[/] [bold]{error.code}[/]: ", end="")
    stderr.print(str(error), markup=False, highlight=False, soft_wrap=soft_wrap)
    if (known := diagnostic_of(error)) is not None:
        stderr.print(advice(known), markup=False, highlight=False, soft_wrap=soft_wrap)


def fail(error: TransferError, *, as_json: bool, facts: dict[str, object] | None = None) -> int:
    """Print an error for whoever reads; returns the exit code."""
    if as_json:
        print_json({**(facts or {}), "error": error_json(error)})
    else:
        print_error(error)
    return code_for(error)


def human_bytes(nbytes: float) -> str:
    """`1.5 GB`: decimal units, as rates are given."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("the last unit takes everything")


@contextlib.contextmanager
def progress_bar(label: str, *, enabled: bool, rank: int = 0) -> Iterator[Callable[[RankProgress], None]]:
    """A bar with bytes, rate and time left, for one rank; gives the function that moves it.

    Args:
        enabled: False prints nothing and costs nothing.
    """
    if not enabled:
        yield lambda _: None
        return
    with _bars(label) as bars:
        bars.add(rank)
        yield partial(bars.update, rank)


@contextlib.contextmanager
def rank_bars(label: str, *, enabled: bool) -> Iterator[Callable[[int, RankProgress], None]]:
    """A bar for each rank, from when it first moves; gives the function that moves them, from any thread.

    Args:
        enabled: False prints nothing and costs nothing.
    """
    if not enabled:
        yield lambda _rank, _progress: None
        return
    with _bars(label) as bars:
        yield bars.update


@contextlib.contextmanager
def byte_bar(label: str, *, total: int, enabled: bool, rank: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar for work in one pass; gives the function that adds bytes to it."""
    done = 0
    with progress_bar(label, enabled=enabled, rank=rank) as moved:

        def add(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            moved(RankProgress(bytes_total=total, bytes_disk=done))

        yield add


class _RateColumn(ProgressColumn):
    """The present rate, or that of the whole where a transfer was over before the present one could be measured."""

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed or (task.completed / task.elapsed if task.elapsed else 0)
        return Text(f"{human_bytes(rate)}/s", style="progress.data.speed")


@contextlib.contextmanager
def _bars(label: str) -> Iterator[_Bars]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        _RateColumn(),
        TimeRemainingColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=stderr) as progress:
        try:
            yield _Bars(progress, label)
        except BaseException:
            # Of work that failed before it began nothing is worth keeping above the error.
            progress.live.transient = not any(task.completed for task in progress.tasks)
            raise


class _Bars:
    """Bars by rank."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._label = label
        self._lock = threading.Lock()
        self._by_rank: dict[int, _Bar] = {}

    def add(self, rank: int) -> _Bar:
        """The bar of a rank, which is there from now on."""
        with self._lock:
            if rank not in self._by_rank:
                task = self._progress.add_task(f"{self._label} rank {rank}", total=None, state="")
                self._by_rank[rank] = _Bar(self._progress, task)
            return self._by_rank[rank]

    def update(self, rank: int, now: RankProgress) -> None:
        self.add(rank).update(now)


class _Bar:
    """Moves a bar, a few times a second at most: drawing it for every chunk would cost more than the chunk."""

    _INTERVAL_S = 0.1

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._lock = threading.Lock()
        self._state: TransferState | None = None
        self._drawn_at = 0.0

    def update(self, now: RankProgress) -> None:
        done = now.bytes_peer + now.bytes_disk
        with self._lock:
            clock = time.monotonic()
            if now.state is self._state and done < now.bytes_total and clock - self._drawn_at < self._INTERVAL_S:
                return
            self._state, self._drawn_at = now.state, clock
            # Work that is no transfer has no state to show.
            state = "" if now.state is TransferState.PLANNED else str(now.state)
            self._progress.update(self._task, completed=done, total=now.bytes_total, state=state)
