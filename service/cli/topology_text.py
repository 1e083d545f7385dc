"""Topologies that are written as one value: `tp=8`, `tp=4,pp=2`."""

from __future__ import annotations

import re

from weightwire.transfer.errors import ManifestError, SettingsError
from weightwire.transfer.manifest import Topology

_SIZE = re.compile(r"(tp|pp|ep)=([1-9][0-9]{0,6})", re.ASCII)
# Every rank is laid out; more than these are a slip of the hand.
_MOST_RANKS = 1 << 14
_SHOWN = 80


def parse_topology(flag: str, text: str) -> Topology:
    """Read a topology; sizes that are not named are 1.

    Args:
        flag: Where the text was given, for the message.
        text: Such as `tp=16,ep=16`.

    Raises:
        SettingsError: If it is no topology, or one of more ranks than can be meant.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = _SIZE.fullmatch(part.strip())
        if found is None or found[1] in sizes:
            raise SettingsError(
                f"{flag} {text[:_SHOWN]!r}: expected sizes from 1, each once, such as tp=8 or tp=4,pp=2,ep=2"
            )
        sizes[found[1]] = int(found[2])
    try:
        topology = Topology(**sizes)
    except ManifestError as error:
        raise SettingsError(f"{flag} {text[:_SHOWN]!r}: {error}") from error
    if topology.world_size > _MOST_RANKS:
        raise SettingsError(
            f"{flag} {text[:_SHOWN]!r}: has {topology.world_size} ranks, expected at most {_MOST_RANKS}"
        )
    return topology
