"""Draws a fleet: instances, transfers, and as a tree who feeds whom. Pure: the same values give the same lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from weightwire.service.cli.fleet import FeedView, Fleet, InstanceView, RankView, Rates, TransferView
from weightwire.service.cli.output import human_bytes
from weightwire.service.cli.text_columns import (
    Column,
    column_line,
    column_widths,
    fold_sentence,
    shorten_name,
    shorten_sentence,
)

_STYLES = {
    "ready": "green", "receiving": "cyan", "verifying": "cyan", "failed": "red", "cancelled": "yellow",
    "expired": "red", "incomplete": "yellow",
}  # fmt: skip
_INDENT = 2
_LEAST_NAME = 8
# A live view is about what goes on; of the past it shows the newest.
_ENDED_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What is drawn on.

    Attributes:
        width: In cells; no line is longer, but for ids on a page that is not live.
        live: A page that is drawn again and again: what does not fit is shortened. Else ids, which people copy, stay
            whole, and sentences go on in further lines.
    """

    width: int
    live: bool = False

    def row(self, text: str, *, style: str = "") -> Text:
        """A line of a table, which even the narrowest columns may leave too long."""
        return Text(shorten_sentence(text, self.width) if self.live else text, style=style)

    def sentence(self, text: str, *, style: str = "dim", indent: int = _INDENT) -> Iterator[Text]:
        if self.live:
            yield Text(shorten_sentence(" " * indent + text, self.width), style=style)
        else:
            yield from (Text(line, style=style) for line in fold_sentence(text, self.width, indent=indent))


def fleet_lines(fleet: Fleet, rates: Rates, page: Page) -> list[Text]:
    """Everything, part by part; a live page leaves out transfers that ended long ago."""
    ended = [transfer for transfer in fleet.transfers if not transfer.is_running]
    parts = [
        instance_lines(fleet.instances, page),
        transfer_lines([*fleet.running, *ended[: _ENDED_SHOWN if page.live else None]], rates, page),
        feeding_lines(fleet, rates, page),
    ]
    lines: list[Text] = []
    for part in filter(None, parts):
        lines += [*([Text()] if lines else []), *part]
    return lines or [Text("no instance and no transfer is known")]


def instance_lines(instances: Sequence[InstanceView], page: Page) -> list[Text]:
    """A row for each instance, and below it why it cannot serve."""
    columns = [
        Column(heading="instance", least=_LEAST_NAME if page.live else 0),
        Column(heading="state"),
        Column(heading="readers", right=True),
        Column(heading="lease", right=True),
        Column(heading="version", right=True),
        Column(heading="topology"),
    ]
    rows = [
        [
            each.instance_id, each.state, str(each.readers or ""), _lease(each.lease_s),
            "" if each.version is None else str(each.version), each.topology,
        ]
        for each in instances
    ]  # fmt: skip
    below = [[each.reason] if each.reason else [] for each in instances]
    if page.live:
        columns.append(Column(heading="model", least=_LEAST_NAME))
        rows = [[*row, each.model] for row, each in zip(rows, instances, strict=True)]
    else:
        below = [[_model(each), *said] for each, said in zip(instances, below, strict=True)]
    return list(_table(columns, rows, page, states=[each.state for each in instances], below=below))


def transfer_lines(transfers: Sequence[TransferView], rates: Rates, page: Page) -> list[Text]:
    """A row for each transfer, and below it its error."""
    columns = [
        Column(heading="transfer", least=_LEAST_NAME if page.live else 0),
        Column(heading="state"),
        Column(heading="done", right=True),
        Column(heading="of", right=True),
        Column(heading="rate", right=True),
        Column(heading="ETA", right=True),
    ]
    rows = [
        [
            each.transfer_id, each.state, _percent(each.bytes_done, each.bytes_total),
            human_bytes(each.bytes_total) if each.bytes_total else "", _rate(rates.of(each)), _eta(each, rates),
        ]
        for each in transfers
    ]  # fmt: skip
    below = [[each.error] if each.error else [] for each in transfers]
    if page.live:
        columns.insert(1, Column(heading="target", least=_LEAST_NAME))
        rows = [[row[0], each.target, *row[1:]] for row, each in zip(rows, transfers, strict=True)]
    else:
        below = [[_errand(each), *said] for each, said in zip(transfers, below, strict=True)]
    return list(_table(columns, rows, page, states=[each.state for each in transfers], below=below))


def transfer_details(transfer: TransferView, rates: Rates, page: Page) -> list[Text]:
    """One transfer with all that is known: its sources, its ranks where there are several, and what was not taken."""
    lines = transfer_lines([transfer], rates, page)
    for feed in transfer.feeds:
        lines += page.sentence(f"from {feed.instance_id}: {human_bytes(feed.nbytes)}{_kind(feed)}")
    if transfer.bytes_disk:
        lines += page.sentence(f"from disk: {human_bytes(transfer.bytes_disk)}")
    if len(transfer.ranks) > 1:
        for rank in transfer.ranks:
            lines += page.sentence(_rank_sentence(rank))
    for name, reason in transfer.reasons.items():
        lines += page.sentence(f"not from {name}: {reason}")
    return lines


def feeding_lines(fleet: Fleet, rates: Rates, page: Page) -> list[Text]:
    """A tree of those that give and those that take from them, while anything is moving."""
    tree = _Tree(fleet.running, rates, page)
    lines = list(tree.lines())
    return [Text("who feeds whom", style="bold"), *lines] if lines else []


class _Tree:
    """Sources at the roots; a target stands below each of its sources, and what it feeds below the main one alone."""

    def __init__(self, transfers: Sequence[TransferView], rates: Rates, page: Page) -> None:
        self._rates = rates
        self._page = page
        self._below: defaultdict[str, list[tuple[TransferView, FeedView]]] = defaultdict(list)
        self._main: dict[str, str] = {}
        for transfer in sorted(transfers, key=lambda transfer: transfer.target):
            feeding = list(transfer.feeding)
            for feed in feeding:
                self._below[feed.instance_id].append((transfer, feed))
            if feeding:
                self._main[transfer.transfer_id] = max(feeding, key=lambda feed: feed.nbytes).instance_id
        targets = {transfer.target for transfer in transfers if transfer.transfer_id in self._main}
        self._roots = sorted(name for name in self._below if name not in targets)

    def lines(self) -> Iterator[Text]:
        shown = set[str]()
        # A ring has no root: whatever was not reached from one begins at its first name.
        for root in (*self._roots, *sorted(self._below)):
            if root not in shown:
                yield Text(shorten_name(root, self._page.width), style="bold")
                yield from self._branches(root, "", shown)

    def _branches(self, name: str, margin: str, shown: set[str]) -> Iterator[Text]:
        shown.add(name)
        below = self._below.get(name, [])
        for number, (transfer, feed) in enumerate(below):
            last = number == len(below) - 1
            yield self._branch(transfer, feed, margin + ("└─ " if last else "├─ "))
            if self._main[transfer.transfer_id] == name and transfer.target not in shown:
                yield from self._branches(transfer.target, margin + ("   " if last else "│  "), shown)

    def _branch(self, transfer: TransferView, feed: FeedView, margin: str) -> Text:
        done = _percent(transfer.bytes_done, transfer.bytes_total)
        rate = self._rates.feeds.get((transfer.transfer_id, feed.instance_id))
        if rate is None and len(list(transfer.feeding)) == 1:
            rate = self._rates.of(transfer)
        figures = "  ".join(filter(None, (transfer.state, done, _rate(rate), _kind(feed).strip(" ()"))))
        # Deep in a tree there is less room: the names give way first, then the figures.
        room = max(_LEAST_NAME, min(self._page.width - len(margin) - len(figures) - 2, self._page.width))
        text = shorten_sentence(f"{margin}{shorten_name(transfer.target, room)}  {figures}", self._page.width)
        line = Text(text)
        line.highlight_words([f"  {transfer.state}"], _STYLES.get(transfer.state, ""))
        return line


def _table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    page: Page,
    *,
    states: Sequence[str],
    below: Sequence[Sequence[str]],
) -> Iterator[Text]:
    """Headings, rows, and sentences below some of the rows; nothing where there are no rows."""
    if not rows:
        return
    widths = column_widths(columns, rows, page.width)
    headings = [column.heading for column in columns]
    yield page.row(column_line(columns, widths, headings), style="bold")
    for row, state, sentences in zip(rows, states, below, strict=True):
        line = page.row(column_line(columns, widths, row))
        line.highlight_words([f"  {state}"], _STYLES.get(state, ""))
        yield line
        for sentence in sentences:
            yield from page.sentence(sentence)


def _model(instance: InstanceView) -> str:
    return f"{instance.model}@{instance.revision[:12]}" if instance.revision else instance.model


def _errand(transfer: TransferView) -> str:
    version = "" if transfer.version is None else f" version {transfer.version}"
    return f"{transfer.model}{version} to {transfer.target}, {transfer.seconds:.1f} s"


def _lease(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.0f} s" if seconds > 0 else "over"


def _percent(done: int, total: int) -> str:
    # 100 % is said once it is all there, not when half a per cent is missing.
    return f"{done * 100 // total} %" if total else ""


def _rate(rate: float | None) -> str:
    return f"{human_bytes(rate)}/s" if rate else ""


def _eta(transfer: TransferView, rates: Rates) -> str:
    rate = rates.of(transfer)
    left = transfer.bytes_total - transfer.bytes_done
    return f"{left / rate:.0f} s" if transfer.is_running and rate and left > 0 else ""


def _kind(feed: FeedView) -> str:
    """What a source is beside complete and first."""
    said = [word for word, true in (("relay", feed.relay), (f"standby {feed.standby}", feed.standby > 0)) if true]
    return f" ({', '.join(said)})" if said else ""


def _rank_sentence(rank: RankView) -> str:
    done = f"{human_bytes(rank.bytes_done)} of {human_bytes(rank.bytes_total)}"
    return f"rank {rank.rank}: {rank.state}, {done}" + (f"; {rank.error}" if rank.error else "")
