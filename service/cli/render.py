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
    disk = result.tensors["disk"]
    table.add_row("peers", str(peers), human_bytes(result.bytes_peer), _rate(result.bytes_peer, result.seconds_peer))
    table.add_row("disk", str(disk), human_bytes(result.bytes_disk), _rate(result.bytes_disk, result.seconds_disk))
    total = result.bytes_peer + result.bytes_disk
    table.add_section()
    table.add_row("all", str(peers + disk), human_bytes(total), _rate(total, result.seconds))
    lost = [Text(f"gave up {failure.instance_id}: {failure.code}") for failure in result.failures]
    return Group(_titled(f"ready: {pulled.shells.manifest.model}, every byte verified", table), *lost)


def _rate(nbytes: int, seconds: float) -> str:
    return f"{human_bytes(nbytes / seconds)}/s" if nbytes and seconds > 0 else ""


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
