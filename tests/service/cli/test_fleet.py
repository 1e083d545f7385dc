"""The fleet as values: readers are counted, rates measured over the last seconds, and what is over is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.service.cli.fleets import instance, transfer
from weightwire.service.cli.fleet import Fleet, RateMeter, transfer_view


def fleet(at: float, *done: int, state: str = "receiving") -> Fleet:
    """A transfer for each number of bytes, all from one source."""
    transfers = [
        transfer(number, f"t{number}", {"s": nbytes}, done=nbytes, state=state) for number, nbytes in enumerate(done)
    ]
    return Fleet.of([instance("s")], transfers, at=at)


def test_readers_are_running_transfers_that_read_or_would_read_first() -> None:
    transfers = [
        transfer(0, "a", {"s": 10}),
        transfer(1, "b", {"a": 5, "s": 0}, standby={"s": 1}),
        transfer(2, "c", {"a": 5, "s": 3}, standby={"s": 1}),
        transfer(3, "d", {"s": 10}, state="ready"),
    ]
    seen = Fleet.of([instance("s"), instance("a")], transfers, at=1000.0)
    assert [(each.instance_id, each.readers) for each in seen.instances] == [("s", 2), ("a", 2)]


def test_lease_is_that_of_the_first_rank_to_lose_it() -> None:
    (found,) = Fleet.of([instance("s", versions=(1, 1), leases=(1030.0, 1012.0))], [], at=1000.0).instances
    assert found.lease_s == 12.0


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        pytest.param((3, 3), 3, id="all ranks have it"),
        pytest.param((3, 4), None, id="ranks differ"),
        pytest.param((None, None), None, id="nothing is published"),
    ],
)
def test_version_is_what_all_ranks_have(versions: tuple[int | None, ...], expected: int | None) -> None:
    (found,) = Fleet.of([instance("s", versions=versions, leases=(1012.0, 1012.0))], [], at=1000.0).instances
    assert found.version == expected


def test_ranks_of_one_source_instance_are_added_up() -> None:
    item = transfer(0, "t", {"s": 10})
    sources = item["sources"]
    assert isinstance(sources, list)
    item = {**item, "sources": [*sources, {**sources[0], "rank": 1, "bytes": 5}]}
    assert [(feed.instance_id, feed.nbytes) for feed in transfer_view(item).feeds] == [("s", 15)]


def test_rate_is_measured_between_looks() -> None:
    meter = RateMeter()
    assert meter.observe(fleet(100.0, 0)).transfers == {}
    rates = meter.observe(fleet(102.0, 30))
    assert rates.transfers == {f"{0:024}": 15.0}
    assert rates.feeds == {(f"{0:024}", "s"): 15.0}


def test_rate_forgets_what_was_long_ago() -> None:
    meter = RateMeter()
    rates = [meter.observe(fleet(at, done)) for at, done in ((100, 0), (104, 4000), (105, 4010), (108, 4040))]
    assert rates[-1].transfers == {f"{0:024}": 10.0}


def test_rate_between_rare_looks_is_that_since_the_last_one() -> None:
    meter = RateMeter()
    rates = [meter.observe(fleet(at, done)) for at, done in ((100, 0), (160, 6000), (220, 6060))]
    assert rates[-1].transfers == {f"{0:024}": 1.0}


def test_transfer_that_has_ended_has_its_mean_rate() -> None:
    meter = RateMeter()
    meter.observe(fleet(100.0, 0))
    ended = fleet(102.0, 30, state="ready")
    rates = meter.observe(ended)
    assert rates.transfers == {}
    assert rates.of(ended.transfers[0]) == ended.transfers[0].mean_rate
    assert rates.of(replace(ended.transfers[0], mean_rate=None)) is None
