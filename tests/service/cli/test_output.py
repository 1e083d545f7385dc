"""What the commands print: errors as JSON, and bars that go when there is nothing to see."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from weightwire.service.cli import output
from weightwire.service.cli.output import error_json, progress_bar
from weightwire.transfer.errors import CheckpointError, NamesError
from weightwire.transfer.session import RankProgress

# Up one line and erase it. Source: ECMA-48, CUU and EL.
ERASED = "\x1b[1A\x1b[2K"


def test_error_with_a_hundred_thousand_names_is_printed_in_short() -> None:
    names = [f"model.layers.{number}" for number in range(100_000)]
    told = error_json(NamesError("names", unexpected=names))
    assert told == {
        "code": "names_unexpected",
        "detail": "names",
        "unexpected": names[:100],
        "unexpected_total": 100_000,
    }


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    found = io.StringIO()
    monkeypatch.setattr(output, "stderr", Console(file=found, force_terminal=True, width=120))
    return found


def fail_after(done: int) -> None:
    with progress_bar("loading", enabled=True) as moved:
        if done:
            moved(RankProgress(bytes_total=10, bytes_disk=done))
        raise CheckpointError("no")


@pytest.mark.parametrize(
    ("done", "is_erased"),
    [pytest.param(0, True, id="before anything was read"), pytest.param(5, False, id="after a part was read")],
)
def test_bar_of_work_that_failed_stays_only_if_it_shows_something(
    screen: io.StringIO, done: int, is_erased: bool
) -> None:
    with pytest.raises(CheckpointError):
        fail_after(done)
    assert screen.getvalue().endswith(ERASED) == is_erased


def test_bar_of_work_that_is_done_stays(screen: io.StringIO) -> None:
    with progress_bar("loading", enabled=True) as moved:
        moved(RankProgress(bytes_total=10, bytes_disk=10))
    assert not screen.getvalue().endswith(ERASED)
