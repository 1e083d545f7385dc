"""Warming the page cache in the background: who reads what, and what the handle says about it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from weightwire.transfer.checkpoint.discovery import CheckpointFiles
from weightwire.transfer.checkpoint.iteration import start_prefetch
from weightwire.transfer.checkpoint.prefetch import Prefetch, share_of_rank
from weightwire.transfer.checkpoint.read_plan import ReadOptions, choose_reader
from weightwire.transfer.checkpoint.regular_files import read_at
from weightwire.transfer.errors import CheckpointError, SettingsError

PATIENCE_S = 30.0


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, file in enumerate(made):
        file.write_bytes(bytes([number]) * (10 + number))
    return made


class Blocks:
    """Reads as the real one does; keeps which bytes were read, and can hold the reader in its first block."""

    def __init__(self, *, held: bool = False) -> None:
        self.got: list[tuple[int, int]] = []
        self.entered, self.free = threading.Event(), threading.Event()
        if not held:
            self.free.set()

    def __call__(self, fd: int, offset: int, buffer: memoryview) -> int:
        count = read_at(fd, offset, buffer)
        self.got.append((offset, count))
        self.entered.set()
        assert self.free.wait(PATIENCE_S)
        return count


# L41
@pytest.mark.parametrize(("rank", "expected"), [(0, "024"), (1, "13")])
def test_ranks_of_a_node_deal_the_sorted_files(rank: int, expected: str) -> None:
    files = [Path(name) for name in "30142"]
    assert share_of_rank(files, local_rank=rank, local_size=2) == tuple(map(Path, expected))


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_rank_outside_of_its_node_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="local rank"):
        share_of_rank([], local_rank=rank, local_size=size)


# L41
def test_prefetch_reads_front_to_back_in_blocks(files: list[Path]) -> None:
    blocks = Blocks()
    with Prefetch(files, threads=1, block_bytes=4, read_block=blocks) as prefetch:
        prefetch.wait(PATIENCE_S)
    assert blocks.got == [(0, 4), (4, 4), (8, 2), (0, 4), (4, 4), (8, 3), (0, 4), (4, 4), (8, 4)]
    assert (prefetch.done, prefetch.cancelled, prefetch.failed, prefetch.errors) == (True, False, False, ())


# L41
@pytest.mark.parametrize("threads", [0, -1])
def test_prefetch_needs_a_thread(threads: int) -> None:
    with pytest.raises(SettingsError, match="prefetch_threads"):
        Prefetch([], threads=threads)
    with pytest.raises(SettingsError, match="prefetch_block_bytes"):
        Prefetch([], block_bytes=threads)


# L42
def test_unreadable_file_is_an_error_and_stops_no_other(files: list[Path]) -> None:
    files[1].unlink()
    blocks = Blocks()
    with Prefetch(files, threads=1, read_block=blocks) as prefetch:
        prefetch.wait(PATIENCE_S)
    assert [count for _, count in blocks.got] == [10, 12]
    assert prefetch.failed
    assert not prefetch.cancelled
    [(path, error)] = prefetch.errors
    assert path == files[1]
    assert isinstance(error, CheckpointError)


# L42
def test_cancel_in_the_middle_of_a_file_is_no_failure(files: list[Path]) -> None:
    blocks = Blocks(held=True)
    prefetch = Prefetch(files, threads=1, block_bytes=4, read_block=blocks)
    assert blocks.entered.wait(PATIENCE_S)
    prefetch.cancel()
    blocks.free.set()
    prefetch.wait(PATIENCE_S)
    assert blocks.got == [(0, 4)]
    assert (prefetch.done, prefetch.cancelled, prefetch.failed, prefetch.errors) == (True, True, False, ())


# L42
def test_cancel_after_the_end_changes_nothing(files: list[Path]) -> None:
    with Prefetch(files) as prefetch:
        prefetch.wait(PATIENCE_S)
    assert (prefetch.done, prefetch.cancelled, prefetch.failed) == (True, False, False)


# L42
# A thread that dies is the very case.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_worker_that_ends_before_its_mark_is_a_failure_without_errors(files: list[Path]) -> None:
    def leave(_fd: int, _offset: int, _buffer: memoryview) -> int:
        raise SystemExit

    prefetch = Prefetch(files, threads=2, read_block=leave)
    prefetch.wait(PATIENCE_S)
    assert (prefetch.done, prefetch.failed, prefetch.errors) == (True, True, ())


# L42
def test_wait_and_stop_say_when_it_is_still_running(files: list[Path]) -> None:
    blocks = Blocks(held=True)
    prefetch = Prefetch(files, threads=1, read_block=blocks)
    assert blocks.entered.wait(PATIENCE_S)
    for end in (prefetch.wait, prefetch.stop):
        with pytest.raises(TimeoutError, match="still running"):
            end(0.01)
    assert not prefetch.done
    assert not prefetch.failed
    blocks.free.set()
    prefetch.stop()
    assert (prefetch.done, prefetch.cancelled, prefetch.failed) == (True, True, False)


def test_prefetch_of_nothing_is_done() -> None:
    prefetch = Prefetch([])
    assert (prefetch.done, prefetch.failed, prefetch.cancelled) == (True, False, False)


# L43
def test_prefetch_is_not_started_without_mmap(files: list[Path]) -> None:
    found = CheckpointFiles(folder=files[0].parent, files=tuple(files))
    plan = choose_reader(ReadOptions(mmap=False, prefetch=True))
    assert start_prefetch(found, plan) is None
    assert start_prefetch(found, choose_reader()) is None


# L25
def test_prefetch_warms_the_files_that_were_found_and_no_later_ones(files: list[Path]) -> None:
    found = CheckpointFiles(folder=files[0].parent, files=tuple(files[:2]))
    prefetch = start_prefetch(found, choose_reader(ReadOptions(prefetch=True)), threads=1)
    assert prefetch is not None
    with prefetch:
        prefetch.wait(PATIENCE_S)
    assert not prefetch.failed
