"""Topologies that are written as one value."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.service.cli.topology_text import parse_topology
from weightwire.transfer.errors import SettingsError
from weightwire.transfer.manifest import Topology


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp=8", Topology(tp=8)),
        ("tp=4,pp=2", Topology(tp=4, pp=2)),
        (" ep=16, tp=16 ", Topology(tp=16, ep=16)),
        ("pp=3", Topology(pp=3)),
        ("tp=1", Topology()),
    ],
)
def test_sizes_that_are_not_named_are_one(text: str, expected: Topology) -> None:
    assert parse_topology("--to", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "8", "tp", "tp=", "tp=0", "tp=-1", "tp=08", "tp=+8", "tp=8.0", "tp=٨", "tp=8,", ",tp=8", "tp 8"),
        *("tp=8,tp=8", "TP=8", "dp=2", "tp=8;pp=2", "tp=8 pp=2", "tp==8", "tp=8\n,", "tp=99999999"),
        *("tp=4,ep=3", "ep=2", "tp=" + "9" * 9999),
        *("tp=1000000,pp=1000000", "tp=16385"),
    ],
)  # fmt: skip
def test_anything_else_is_wrong_usage_that_names_the_flag(text: str) -> None:
    with pytest.raises(SettingsError, match=re.escape("--from ")) as raised:
        parse_topology("--from", text)
    assert len(str(raised.value)) < 250


@given(st.text(max_size=30) | st.from_regex(r"(tp|pp|ep)=[0-9]{1,3}(,(tp|pp|ep)=[0-9]{1,3}){0,2}", fullmatch=True))
def test_text_is_a_topology_or_refused(text: str) -> None:
    try:
        found = parse_topology("--to", text)
    except SettingsError:
        return
    assert found.world_size >= 1
    assert parse_topology("--to", f"tp={found.tp},pp={found.pp},ep={found.ep}") == found
