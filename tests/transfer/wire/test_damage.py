"""How much damage is bad luck."""

from __future__ import annotations

import pytest

from weightwire.transfer.wire.damage import DamageRecord


def test_one_flipped_bit_in_a_hundred_frames_is_bad_luck_for_ever() -> None:
    record = DamageRecord()
    for frame in range(0, 100_000, 100):
        record.count_good(99)
        assert not record.is_last_straw(frame)
    assert record.damaged == 1000


def test_frame_that_is_wrong_twice_is_the_last_straw() -> None:
    record = DamageRecord()
    record.count_good(1000)
    assert not record.is_last_straw(7)
    assert not record.is_last_straw(8)
    assert record.is_last_straw(7)


@pytest.mark.parametrize(
    ("good", "last_straw"),
    [
        pytest.param(0, 20, id="the twentieth where nothing is good: fewer say nothing"),
        pytest.param(18, 3, id="the third of twenty-one"),
        pytest.param(180, 21, id="one more than a tenth"),
    ],
)
def test_more_than_a_tenth_of_at_least_twenty_is_the_last_straw(good: int, last_straw: int) -> None:
    record = DamageRecord()
    record.count_good(good)
    verdicts = [record.is_last_straw(frame) for frame in range(last_straw)]
    assert verdicts == [False] * (last_straw - 1) + [True]


def test_framing_may_be_lost_now_and_then_but_not_twice_in_a_row() -> None:
    record = DamageRecord()
    for _ in range(5):
        record.count_good(100)
        assert not record.breaks_again()
    assert record.breaks_again()


def test_framing_that_is_lost_after_every_few_frames_is_the_last_straw() -> None:
    record = DamageRecord()
    for _ in range(6):
        record.count_good(2)
        assert not record.breaks_again()
    record.count_good(2)
    assert record.breaks_again()
