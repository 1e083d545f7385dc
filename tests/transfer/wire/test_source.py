"""What a source serves, and to how many: no socket here."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.transfer.conftest import KEY, PATIENCE_S, filled
from weightwire.transfer.errors import FencedError, SourceBusyError, SourceLeavingError, TicketError
from weightwire.transfer.shells import Shells
from weightwire.transfer.tickets import Ticket, issue_ticket
from weightwire.transfer.wire.limits import Capacity, LimitOverrides, SourceLimits
from weightwire.transfer.wire.source import Access, Publication, Source, SourceIdentity


def sealed(seed: int = 0) -> Shells:
    shells = Shells.from_tensors({"a": filled("float32", (4,), seed=seed)})
    shells.seal()
    return shells


def wait_until_withdrawn(source: Source) -> None:
    while source.publication is not None:
        time.sleep(0)


@pytest.fixture
def source() -> Source:
    found = Source(SourceIdentity(instance_id="s"), SourceLimits(max_readers=2, retry_after_s=9))
    found.publish(sealed(), weight_version=1)
    return found


def test_reader_holds_what_is_published(source: Source) -> None:
    with source.reading() as publication:
        assert publication is source.publication
        assert publication.weight_version == 1
        assert source.active_readers == 1
        source.check_stands(publication)
    assert source.active_readers == 0


def test_reader_that_fails_is_counted_out(source: Source) -> None:
    with pytest.raises(KeyError), source.reading():
        raise KeyError
    assert source.active_readers == 0


def test_readers_beyond_the_limit_are_asked_to_come_back(source: Source) -> None:
    with source.reading(), source.reading():
        with pytest.raises(SourceBusyError, match="2 readers") as caught, source.reading():
            pass
        assert caught.value.facts == {"retry_after_s": 9}
        assert source.active_readers == 2
    with source.reading():
        pass


def test_limits_change_while_readers_are_under_way(source: Source) -> None:
    other = Source.of_ranks(SourceIdentity(instance_id="s"), (0, 1), source.limits)
    for each in other.values():
        each.publish(sealed(), weight_version=1)
    with other[0].reading(), other[1].reading():
        other[1].set_limits(SourceLimits(max_readers=1, retry_after_s=2))
        assert other[0].limits.max_readers == 1
        with pytest.raises(SourceBusyError, match="1 readers") as caught, other[0].reading():
            pass
        assert caught.value.facts == {"retry_after_s": 2}
        assert other[0].capacity.readers == 2, "who reads goes on"
    with other[0].reading():
        pass
    other[0].set_limits(SourceLimits(max_readers=0))
    with pytest.raises(SourceBusyError, match="0 readers"), other[1].reading():
        pass


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_bytes_per_s": 0}, "max_bytes_per_s: is 0, expected 65536 at least.*max_readers=0"),
        ({"max_bytes_per_s": 65535}, "max_bytes_per_s: is 65535"),
        ({"max_readers": -1}, "max_readers: is -1"),
    ],
)
def test_limits_that_look_like_a_dead_source_are_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SourceLimits(**limits)


@pytest.mark.parametrize(
    ("overrides", "readers", "rate"),
    [
        pytest.param(LimitOverrides(), 3, 70_000, id="nothing is set"),
        pytest.param(LimitOverrides(max_readers=0), 0, 70_000, id="readers are"),
        pytest.param(LimitOverrides(max_bytes_per_s=90_000), 3, 90_000, id="the rate is"),
        pytest.param(LimitOverrides(max_bytes_per_s="unlimited"), 3, None, id="the rate is taken away"),
    ],
)
def test_overrides_leave_what_they_do_not_name(overrides: LimitOverrides, readers: int, rate: int | None) -> None:
    limits = overrides.over(SourceLimits(max_readers=3, max_bytes_per_s=70_000, retry_after_s=9))
    assert (limits.max_readers, limits.max_bytes_per_s, limits.retry_after_s) == (readers, rate, 9)


def test_source_that_publishes_nothing_is_busy() -> None:
    with (
        pytest.raises(SourceBusyError, match="source 's' rank 0: nothing is published"),
        Source(SourceIdentity(instance_id="s")).reading(),
    ):
        pass


def test_shells_without_digests_are_not_published(source: Source) -> None:
    with pytest.raises(ValueError, match="seal"):
        source.publish(Shells.from_tensors({"a": filled("int8", (4,))}), weight_version=2)
    assert source.publication is not None
    assert source.publication.weight_version == 1


def test_shells_without_bytes_are_published_without_digests() -> None:
    source = Source(SourceIdentity(instance_id="s"))
    source.publish(Shells.from_tensors({"a": torch.empty(0)}), weight_version=1)
    assert source.publication is not None


def test_next_version_fences_who_reads_the_former(source: Source) -> None:
    with source.reading() as former:
        source.publish(sealed(seed=1), weight_version=2)
        with pytest.raises(FencedError, match="weight version 1"):
            source.check_stands(former)
        with source.reading() as publication:
            assert publication.weight_version == 2


def test_withdraw_without_readers_returns_at_once(source: Source) -> None:
    source.withdraw(drain_s=PATIENCE_S)
    assert source.publication is None
    source.withdraw(drain_s=PATIENCE_S)


def test_withdraw_lets_readers_finish_and_no_new_one_in(source: Source) -> None:
    inside, go = threading.Event(), threading.Event()
    stood: list[Publication] = []

    def read() -> None:
        with source.reading() as publication:
            inside.set()
            go.wait(PATIENCE_S)
            source.check_stands(publication)
            stood.append(publication)

    reader = threading.Thread(target=read)
    reader.start()
    inside.wait(PATIENCE_S)
    leaving = threading.Thread(target=source.withdraw, kwargs={"drain_s": PATIENCE_S})
    leaving.start()
    wait_until_withdrawn(source)
    with pytest.raises(SourceLeavingError), source.reading():
        pass
    assert leaving.is_alive()
    go.set()
    leaving.join(PATIENCE_S)
    reader.join(PATIENCE_S)
    assert len(stood) == 1


def test_withdraw_fences_the_readers_that_do_not_finish_in_time(source: Source) -> None:
    with source.reading() as publication:
        source.withdraw(drain_s=0.01)
        with pytest.raises(FencedError, match="withdrawn"):
            source.check_stands(publication)
    assert source.active_readers == 0


def test_publication_that_comes_while_the_former_is_withdrawn_stays(source: Source) -> None:
    with source.reading():
        leaving = threading.Thread(target=source.withdraw, kwargs={"drain_s": 100 * PATIENCE_S})
        leaving.start()
        wait_until_withdrawn(source)
        source.publish(sealed(seed=1), weight_version=2)
        leaving.join(PATIENCE_S)
        assert not leaving.is_alive()
    assert source.publication is not None
    assert source.publication.weight_version == 2


def test_generation_is_new_and_higher_for_each_process() -> None:
    first = SourceIdentity(instance_id="s").generation
    while (second := SourceIdentity(instance_id="s").generation) == first:
        pass
    assert second > first > 1_600_000_000_000


# Tickets


def ticket(key: bytes, *, expires_in_s: float = 60) -> str:
    return issue_ticket(
        key,
        Ticket(
            transfer_id="t",
            source_instance="s",
            source_rank=0,
            source_generation=1,
            target_instance="x",
            target_rank=0,
            weight_version=1,
            expires_at=time.time() + expires_in_s,
        ),
    )


def test_source_without_a_key_is_busy(source: Source) -> None:
    with pytest.raises(SourceBusyError, match="not registered") as caught:
        source.read_ticket(ticket(KEY))
    assert caught.value.facts == {"retry_after_s": 9}


def test_ticket_of_the_key_before_stays_good_and_those_of_older_ones_do_not(source: Source) -> None:
    keys = [bytes([number]) * 32 for number in range(3)]
    for key in keys:
        source.grant_access(Access(ticket_key=key))
        source.grant_access(Access(ticket_key=key))
    assert source.read_ticket(ticket(keys[2])).transfer_id == "t"
    assert source.read_ticket(ticket(keys[1])).transfer_id == "t"
    for bad in (ticket(keys[0]), ticket(keys[1], expires_in_s=-1), "x", ""):
        with pytest.raises(TicketError):
            source.read_ticket(bad)


# Seats


def test_readers_in_line_get_seats_in_the_order_of_coming_before_those_that_come_again() -> None:
    capacity = Capacity(SourceLimits(max_readers=1, seat_wait_s=PATIENCE_S))
    assert capacity.take_seat()
    came, served = list[threading.Thread](), list[int]()
    for number in range(3):
        came.append(threading.Thread(target=sit, args=(capacity, number, served)))
        came[-1].start()
        while capacity.in_line <= number:
            time.sleep(0)
    capacity.leave_seat()
    assert capacity.take_seat(), "it is served as well, after all of them"
    assert served == [0, 1, 2]
    for thread in came:
        thread.join(PATIENCE_S)
    capacity.leave_seat()
    assert capacity.readers == capacity.in_line == 0


def sit(capacity: Capacity, number: int, served: list[int]) -> None:
    assert capacity.take_seat()
    served.append(number)
    capacity.leave_seat()


def test_seats_that_are_added_go_to_those_in_line_and_nobody_waits_where_none_will_come() -> None:
    capacity = Capacity(SourceLimits(max_readers=0, seat_wait_s=PATIENCE_S))
    assert not capacity.take_seat()
    capacity.set_limits(SourceLimits(max_readers=1, seat_wait_s=PATIENCE_S))
    assert capacity.take_seat()
    served = list[int]()
    thread = threading.Thread(target=sit, args=(capacity, 1, served))
    thread.start()
    while not capacity.in_line:
        time.sleep(0)
    capacity.set_limits(SourceLimits(max_readers=2, seat_wait_s=PATIENCE_S))
    thread.join(PATIENCE_S)
    assert served == [1]
    capacity.set_limits(SourceLimits(max_readers=1, seat_wait_s=0.0))
    assert not capacity.take_seat()
