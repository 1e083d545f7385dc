"""Tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from weightwire.service.cli.output import human_bytes
from weightwire.service.client.pulls import Pulled
from weightwire.transfer.filling import FillResult
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.plan import Plan

_REASONS_SHOWN = 6
_WAYS = ("identical", "reshard", "disk", "constant")


def plan_table(plans: Sequence[tuple[Plan, Manifest]]) -> Group:
    """How many tensors of each rank go which way, and why."""
    several = len(plans) > 1
    headings = [("rank", "right")] if several else []
    headings += [("way", "left"), ("tensors", "right"), ("bytes", "right"), ("why", "left")]
    table = Table()
    for heading, justify in headings:
        table.add_column(heading, justify="right" if justify == "right" else "left")
    for plan, layout in plans:
        for number, row in enumerate(_plan_rows(plan)):
            table.add_row(*([str(layout.rank) if number == 0 else ""] if several else []), *row)
        if several:
            table.add_section()
    first = plans[0][1]
    whose = f"{len(plans)} ranks" if several else f"rank {first.rank}"
    return _titled(f"plan for {whose} of {first.model}", table)


def _plan_rows(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    """Way, tensors, bytes and reason, the commonest reasons first."""
    count: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for way in plan.ways:
        count[way.way, way.reason] += 1
        nbytes[way.way, way.reason] += way.nbytes
    for (name, reason), tensors in count.most_common(_REASONS_SHOWN):
        yield name, str(tensors), human_bytes(nbytes[name, reason]), reason


def result_table(pulled: Pulled) -> Group:
    """Where the bytes came from, how fast, and what each source gave if there were several."""
    title = f"ready: {pulled.ranks[0].shells.manifest.model}, every byte verified"
    table = _origins_table(pulled.ranks[0].result) if len(pulled.ranks) == 1 else _ranks_table(pulled)
    lost = [Text(f"gave up {failure.instance_id} rank {failure.rank}: {failure.code}") for failure in pulled.failures]
    return Group(_titled(title, table), *_sources_table(pulled), *lost)


def _origins_table(result: FillResult) -> Table:
    table = Table()
    table.add_column("from")
    for heading in ("tensors", "bytes", "rate"):
        table.add_column(heading, justify="right")
    peers = sum(result.tensors[way] for way in ("identical", "reshard"))
    disk, constant = result.tensors["disk"], result.tensors["constant"]
    table.add_row("peers", str(peers), human_bytes(result.bytes_peer), _rate(result.bytes_peer, result.seconds_peer))
    table.add_row("disk", str(disk), human_bytes(result.bytes_disk), _rate(result.bytes_disk, result.seconds_disk))
    if constant:
        table.add_row("nowhere: one value", str(constant), "", "")
    total = result.bytes_peer + result.bytes_disk
    table.add_section()
    table.add_row("all", str(peers + disk + constant), human_bytes(total), _rate(total, result.seconds))
    return table


def _ranks_table(pulled: Pulled) -> Table:
    table = Table()
    for heading in ("rank", *_WAYS, "from peers", "from disk", "rate"):
        table.add_column(heading, justify="right")
    for rank in pulled.ranks:
        table.add_row(*_ways_row(str(rank.rank), rank.result, rank.result.seconds))
    table.add_section()
    table.add_row(*_ways_row("all", pulled, pulled.seconds))
    return table


def _ways_row(what: str, filled: FillResult | Pulled, seconds: float) -> Iterator[str]:
    yield what
    for way in _WAYS:
        yield str(filled.tensors[way])
    yield human_bytes(filled.bytes_peer)
    yield human_bytes(filled.bytes_disk)
    yield _rate(filled.bytes_peer + filled.bytes_disk, seconds)


def _sources_table(pulled: Pulled) -> list[Table]:
    """One source has given what the other table says came from peers."""
    if len(pulled.sources) < 2:
        return []
    table = Table()
    table.add_column("source", no_wrap=True, overflow="fold")
    table.add_column("rank", justify="right")
    table.add_column("bytes", justify="right")
    for source in sorted(pulled.sources, key=lambda source: (source.instance_id, source.rank)):
        table.add_row(Text(source.instance_id), str(source.rank), human_bytes(source.nbytes))
    return [table]


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
