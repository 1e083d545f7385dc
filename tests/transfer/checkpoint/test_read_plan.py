"""Which reader reads, by what was asked for."""

from __future__ import annotations

import pytest

from weightwire.transfer.checkpoint.formats import LoadFormat, ReaderOptions
from weightwire.transfer.checkpoint.read_plan import ReaderKind, ReadOptions, choose_reader
from weightwire.transfer.errors import SettingsError

SINGLE, THREADED, OWN = ReaderKind.SINGLE, ReaderKind.THREADED, ReaderKind.OWN


# L38, L44
@pytest.mark.parametrize(
    ("options", "load_format", "prefetch", "mmap", "expected"),
    [
        pytest.param({}, "auto", False, True, (THREADED, 8), id="no options: eight workers"),
        pytest.param({}, "auto", True, True, (SINGLE, 0), id="prefetch demotes"),
        pytest.param({"num_threads": 8}, "auto", True, True, (THREADED, 8), id="a number was named"),
        pytest.param({"enable_multithread_load": True}, "auto", True, True, (THREADED, 8), id="threads were named"),
        pytest.param({}, "fastsafetensors", True, True, (OWN, 0), id="fastsafetensors has its own reader"),
        pytest.param({}, "auto", True, False, (THREADED, 8), id="without mmap there is no prefetch to demote"),
        pytest.param({"num_threads": 3}, "auto", False, True, (THREADED, 3), id="three threads"),
        pytest.param({"enable_multithread_load": False}, "auto", False, True, (SINGLE, 0), id="threads switched off"),
    ],
)
def test_reader_is_chosen(
    options: dict[str, object], load_format: str, prefetch: bool, mmap: bool, expected: tuple[ReaderKind, int]
) -> None:
    asked = ReadOptions(threads=ReaderOptions.parse(options), prefetch=prefetch, mmap=mmap)
    plan = choose_reader(asked, load_format=LoadFormat(load_format))
    assert (plan.kind, plan.workers) == expected
    assert plan.prefetch == (prefetch and mmap)


@pytest.mark.parametrize("limit", [0, -1])
def test_bound_that_lets_nothing_through_is_refused(limit: int) -> None:
    with pytest.raises(SettingsError, match="max_buffered_bytes"):
        ReadOptions(max_buffered_bytes=limit)
