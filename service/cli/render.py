"""Tables for people."""

from __future__ import annotations

from collections import Counter

from rich.console import Group
from rich.table import Table
from rich.text import Text

from weightwire.service.cli.output import human_bytes
from weightwire.service.client.target import Pulled
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.planning import Plan

_REASONS_SHOWN = 6


def plan_table(plan: Plan, layout: Manifest) -> Group:
    """How many tensors go which way, and why."""
    table = Table()
    for heading, justify in (("way", "left"), ("tensors", "right"), ("bytes", "right"), ("why", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    count: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for way in plan.ways:
        count[way.way, way.reason] += 1
        nbytes[way.way, way.reason] += way.nbytes
    for (name, reason), tensors in count.most_common(_REASONS_SHOWN):
        table.add_row(name, str(tensors), human_bytes(nbytes[name, reason]), reason)
    return _titled(f"plan for rank {layout.rank} of {layout.model}", table)


def result_table(pulled: Pulled) -> Group:
    """Where the bytes came from, and how fast."""
    result = pulled.result
    table = Table()
    table.add_column("from")
    table.add_column("tensors", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("rate", justify="right")
    peers = sum(result.tensors[way] for way in ("identical", "reshard"))
    rows = [("peers", peers, result.bytes_peer), ("disk", result.tensors["disk"], result.bytes_disk)]
    for name, tensors, nbytes in rows:
        table.add_row(name, str(tensors), human_bytes(nbytes), "")
    total = result.bytes_peer + result.bytes_disk
    rate = f"{human_bytes(total / result.seconds)}/s" if result.seconds else ""
    table.add_section()
    table.add_row("all", str(peers + result.tensors["disk"]), human_bytes(total), rate)
    lost = [Text(f"gave up {failure.instance_id}: {failure.code}") for failure in result.failures]
    return Group(_titled(f"ready: {pulled.shells.manifest.model}, every byte verified", table), *lost)


def rows_table(title: str, headings: list[str], rows: list[list[str]]) -> Group:
    """A plain table of texts. Nothing is cut off, and the first column, whose names one copies, is never broken."""
    table = Table()
    for number, heading in enumerate(headings):
        table.add_column(heading, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return _titled(title, table)


def _titled(title: str, table: Table) -> Group:
    # A title of the table's own would be broken at the table's width.
    return Group(Text(title, style="italic"), table)
