"""A plan as people read it: which ways, who sends how much, what is large, and what is not known."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import cast

from rich.table import Table
from rich.text import Text

from weightwire.service.cli.output import human_bytes, stdout
from weightwire.service.cli.render import rows_table
from weightwire.transfer.topology_plan import TopologyPlan

_LARGEST_SHOWN = 10
_DISK_SHOWN = 20
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor of one target rank."""

    rank: int
    name: str
    way: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OddRow:
    """A tensor of which not all is known."""

    side: str
    rank: int
    name: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """What the tables of a plan show.

    Attributes:
        title: Of the first table.
        tensors: All of them, rank by rank.
        sources: Bytes that each source rank sends, by its name.
        targets: Bytes of each target rank.
        odd: What is opaque or uncovered.
        figures: The line below the tables.
    """

    title: str
    tensors: Sequence[TensorRow]
    sources: Mapping[str, int]
    targets: Mapping[int, int]
    odd: Sequence[OddRow]
    figures: str


def view_of_plan(title: str, plan: TopologyPlan) -> PlanView:
    """Of a plan that was made here."""
    opaque = [
        *(OddRow(side="source", rank=rank, name=name, what=f"opaque: {reason}")
          for rank, found in enumerate(plan.source_opaque) for name, reason in found.items()),
        *(OddRow(side="target", rank=rank.rank, name=name, what=f"opaque: {reason}")
          for rank in plan.ranks for name, reason in rank.opaque.items()),
    ]  # fmt: skip
    uncovered = [_uncovered(rank.rank, name, count) for rank in plan.ranks for name, count in rank.uncovered.items()]
    traced = sum(rank.seconds_trace for rank in plan.ranks)
    planned = sum(rank.seconds_plan for rank in plan.ranks)
    return PlanView(
        title=title,
        tensors=[
            TensorRow(rank=rank.rank, name=way.name, way=way.way, nbytes=way.nbytes, reason=way.reason)
            for rank in plan.ranks
            for way in rank.ways
        ],
        sources={str(rank): nbytes for rank, nbytes in enumerate(plan.source_bytes)},
        targets={rank.rank: rank.nbytes for rank in plan.ranks},
        odd=[*opaque, *uncovered],
        figures=f"{_copies(plan.copies)}, {human_bytes(plan.nbytes)}; {len(plan.source_opaque)} source ranks traced in "
        f"{plan.seconds_trace_source:.1f} s, {len(plan.ranks)} target ranks in {traced:.1f} s, planned in "
        f"{planned:.3f} s",
    )


def view_of_answer(title: str, answer: Json) -> PlanView:
    """Of the service's answer, as the command prints it in JSON."""
    tensors = cast("list[Json]", answer["tensors"])
    opaque = [
        OddRow(
            side=str(item.get("side", "target")), rank=cast(int, item.get("rank", 0)), name=str(item["tensor"]),
            what=f"opaque: {item['reason']}",
        )
        for item in cast("list[Json]", answer["opaque"])
    ]  # fmt: skip
    uncovered = [
        _uncovered(cast(int, item["rank"]), str(item["tensor"]), cast(int, item["elements"]))
        for item in cast("list[Json]", answer["uncovered"])
    ]
    return PlanView(
        title=title,
        tensors=[
            TensorRow(
                rank=cast(int, item["rank"]), name=str(item["name"]), way=str(item["way"]),
                nbytes=cast(int, item["bytes"]), reason=str(item["reason"]),
            )
            for item in tensors
        ],
        sources={
            f"{source['instance_id']} rank {source['rank']}": cast(int, source["bytes"])
            for source in cast("list[Json]", answer["sources"])
        },
        targets={int(rank): nbytes for rank, nbytes in cast("dict[str, int]", answer["bytes_per_target_rank"]).items()},
        odd=[*opaque, *uncovered],
        figures=f"{_copies(cast(int, answer['copies']))}, {human_bytes(cast(int, answer['bytes']))}; target traced in "
        f"{answer['seconds_trace']:.1f} s, planned by the service in {answer['seconds_plan']:.3f} s",
    )  # fmt: skip


def print_plan(view: PlanView) -> None:
    """Tables of the width of the terminal; nothing in them is cut off."""
    groups = defaultdict[tuple[str, str], list[int]](list)
    for tensor in view.tensors:
        # Each tensor from disk has a line of its own with its reason.
        groups[tensor.way, "" if tensor.way == "disk" else tensor.reason].append(tensor.nbytes)
    ways = [[way, str(len(sizes)), human_bytes(sum(sizes)), why] for (way, why), sizes in groups.items()]
    stdout.print(rows_table(view.title, ["way", "tensors", "bytes", "why"], ways))
    stdout.print(rows_table("ranks", ["source", "sends", "target", "takes"], _rank_rows(view)))
    _print_largest(view.tensors)
    is_one_rank = len({tensor.rank for tensor in view.tensors}) == 1
    _print_disk([tensor for tensor in view.tensors if tensor.way == "disk"], is_one_rank=is_one_rank)
    for (name, side, what), ranks in _grouped((row.name, row.side, row.what, row.rank) for row in view.odd):
        _print_line(f"  {name} ({side}, {_ranks(ranks)}) is {what}")
    _print_line(view.figures)


def _rank_rows(view: PlanView) -> list[list[str]]:
    sends = [(name, human_bytes(nbytes)) for name, nbytes in view.sources.items()]
    takes = [(str(rank), human_bytes(nbytes)) for rank, nbytes in view.targets.items()]
    return [[*source, *target] for source, target in zip_longest(sends, takes, fillvalue=("", ""))]


def _print_largest(tensors: Sequence[TensorRow]) -> None:
    """Equal parts of all layers are one line: else the layers of one part would be all that is shown."""
    kinds = defaultdict[tuple[str, str], list[TensorRow]](list)
    for tensor in tensors:
        kinds[_NUMBER.sub("*", tensor.name), tensor.way].append(tensor)
    by_size = sorted(kinds.items(), key=lambda kind: -sum(tensor.nbytes for tensor in kind[1]))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_column(no_wrap=True)
    is_one_rank = len({tensor.rank for tensor in tensors}) == 1
    for (name, way), group in by_size[:_LARGEST_SHOWN]:
        names = {tensor.name for tensor in group}
        what = f"{len(names)} x {name}" if len(names) > 1 else next(iter(names))
        ranks = "" if is_one_rank else f", {_ranks(tensor.rank for tensor in group)}"
        total = human_bytes(sum(tensor.nbytes for tensor in group))
        grid.add_row(Text(total), Text(f"{what}{ranks}"), Text(way))
    stdout.print(Text("largest tensors, those of all layers together", style="italic"), grid, sep="\n")


def _print_disk(tensors: Sequence[TensorRow], *, is_one_rank: bool) -> None:
    found = list(_grouped((tensor.name, tensor.reason, "", tensor.rank) for tensor in tensors))
    for (name, reason, _), ranks in found[:_DISK_SHOWN]:
        where = "" if is_one_rank else f", {_ranks(ranks)}"
        _print_line(f"  disk: {name}{where} ({reason})")
    if len(found) > _DISK_SHOWN:
        _print_line(f"  and {len(found) - _DISK_SHOWN} more from disk")


def _print_line(text: str) -> None:
    stdout.print(text, markup=False, highlight=False, soft_wrap=True)


def _grouped(rows: Iterable[tuple[str, str, str, int]]) -> Iterator[tuple[tuple[str, str, str], list[int]]]:
    """Rows that only their rank tells apart, as one with all ranks."""
    groups = defaultdict[tuple[str, str, str], list[int]](list)
    for *key, rank in rows:
        groups[key[0], key[1], key[2]].append(rank)
    yield from groups.items()


def _copies(count: int) -> str:
    return "1 copy" if count == 1 else f"{count} copies"


def _uncovered(rank: int, name: str, elements: int) -> OddRow:
    return OddRow(side="target", rank=rank, name=name, what=f"uncovered: {elements} elements have no source at all")


def _ranks(numbers: Iterable[int]) -> str:
    """`rank 7`, `ranks 0-3, 7`."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"
