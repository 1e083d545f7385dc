"""The page cache: filled before, dropped after, and no fault if the platform cannot."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from weightwire.transfer.checkpoint.page_cache import drop_page_cache, is_cached, read_ahead
from weightwire.transfer.errors import CancelledError

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    path.write_bytes(bytes(10 * MIB))
    return path


def never() -> bool:
    return False


# L40
def test_drop_advises_the_open_file(file: Path) -> None:
    sizes = list[int]()
    drop_page_cache(file, advise=lambda fd: sizes.append(os.fstat(fd).st_size))
    assert sizes == [10 * MIB]


# L40
def test_drop_does_nothing_where_the_platform_has_no_such_call(tmp_path: Path) -> None:
    drop_page_cache(tmp_path / "not even there", advise=None)


# L40
def test_drop_that_fails_is_a_line_for_debugging(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: int) -> None:
        raise OSError(22, "no advice here")

    with caplog.at_level(logging.DEBUG, "weightwire"):
        drop_page_cache(file, advise=refuse)
        drop_page_cache(file.with_name("gone"))
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG"]
    assert "no advice here" in caplog.text


# L40
def test_drop_takes_a_file_out_of_the_page_cache(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(fd, 5 * MIB):
            pytest.skip("this file system keeps its pages, or does not tell")
        # The range goes over the middle of a block, and nothing else of the file is asked for.
        assert read_ahead(fd, [(5 * MIB, 10 * MIB)], is_stopped=never) is None
        assert is_cached(fd, 5 * MIB)
        assert is_cached(fd, 10 * MIB - 1)
        drop_page_cache(file)
        assert not is_cached(fd, 5 * MIB)
    finally:
        os.close(fd)


def test_read_ahead_says_where_the_file_ends(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        assert read_ahead(fd, [(0, 3), (9 * MIB, 11 * MIB)], is_stopped=never) == 10 * MIB
        assert read_ahead(fd, [], is_stopped=never) is None
    finally:
        os.close(fd)


def test_read_ahead_stops_between_blocks(file: Path) -> None:
    asked = list[int]()

    def second_time() -> bool:
        asked.append(1)
        return len(asked) == 2

    fd = os.open(file, os.O_RDONLY)
    try:
        with pytest.raises(CancelledError):
            read_ahead(fd, [(0, 10 * MIB)], is_stopped=second_time)
    finally:
        os.close(fd)
    assert len(asked) == 2
