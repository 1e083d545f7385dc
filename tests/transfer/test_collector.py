"""The collector is off inside of the block, and as it was behind it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from weightwire.transfer.collector import collector_paused


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


def fail_inside() -> None:
    with collector_paused():
        assert not gc.isenabled()
        raise ValueError("inside")


def test_collector_is_paused_until_the_last_block_ends_also_by_an_error() -> None:
    with collector_paused():
        with pytest.raises(ValueError, match="inside"):
            fail_inside()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_blocks_of_two_threads_may_overlap() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert entered.wait(30)
    assert not gc.isenabled()
    leave.set()
    thread.join(30)
    assert gc.isenabled()
