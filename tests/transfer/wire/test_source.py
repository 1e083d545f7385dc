"""What a source serves, and to how many: no socket here."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.transfer.conftest import KEY, PATIENCE_S, filled
from weightwire.transfer.errors import FencedError, SourceBusyError, TicketError
from weightwire.transfer.shells import Shells
from weightwire.transfer.tickets import Ticket, issue_ticket
from weightwire.transfer.wire.source import Access, Publication, Source, SourceIdentity, SourceLimits


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
    with pytest.raises(SourceBusyError), source.reading():
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
