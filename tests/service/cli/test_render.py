"""Tables and bars of a pull, for people: of one rank as ever, of several each by its number."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
import torch
from rich.console import Console, RenderableType

from weightwire.service.cli import output
from weightwire.service.cli.output import rank_bars
from weightwire.service.cli.render import plan_table, result_table
from weightwire.service.client.pulls import Pulled, PulledRank
from weightwire.transfer.filling import FillResult, SourceBytes
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.manifest import Topology
from weightwire.transfer.plan import Plan, TensorWay
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.puller import SourceFailure

LOST = SourceFailure(instance_id="lost", rank=2, code="source_stalled", detail="no bytes for 5 s")


def shells(rank: int) -> Shells:
    identity = ModelIdentity(model="org/model", topology=Topology(tp=2), rank=rank)
    return Shells.from_tensors({"w": torch.ones(3)}, identity)


def filled(given: Mapping[tuple[str, int], int], *, disk: int = 0, constant: int = 0) -> FillResult:
    return FillResult(
        seconds=2.0,
        seconds_peer=1.0,
        seconds_disk=1.0,
        tensors={"identical": 1, "reshard": 20, "disk": 3, "constant": constant},
        bytes_peer=sum(given.values()),
        bytes_disk=disk,
        sources=tuple(
            SourceBytes(instance_id=name, rank=rank, nbytes=nbytes) for (name, rank), nbytes in given.items()
        ),
        failures=(LOST,),
    )


def pulled(*results: FillResult) -> Pulled:
    ranks = tuple(PulledRank(rank=rank, shells=shells(rank), result=result) for rank, result in enumerate(results))
    return Pulled(ranks=ranks, transfer_id="t", weight_version=1, seconds=4.0, reasons={})


def rows(table: RenderableType) -> list[list[str]]:
    """The words of each line of a table that is drawn, without its frame."""
    screen = io.StringIO()
    Console(file=screen, width=120).print(table)
    lines = (line.translate(str.maketrans("│┃", "  ")).split() for line in screen.getvalue().splitlines())
    return [words for words in lines if words and words[0][0].isalnum()]


def test_result_of_several_ranks_has_a_row_for_each_and_one_for_each_source_rank() -> None:
    shown = rows(result_table(pulled(filled({("s", 0): 3000, ("s", 1): 1000}), filled({("s", 1): 500}, disk=1500))))
    assert shown[1:5] == [
        ["rank", "identical", "reshard", "disk", "constant", "from", "peers", "from", "disk", "rate"],
        ["0", "1", "20", "3", "0", "4.0", "kB", "0", "B", "2.0", "kB/s"],
        ["1", "1", "20", "3", "0", "500", "B", "1.5", "kB", "1.0", "kB/s"],
        ["all", "2", "40", "6", "0", "4.5", "kB", "1.5", "kB", "1.5", "kB/s"],
    ]
    assert shown[5:8] == [["source", "rank", "bytes"], ["s", "0", "3.0", "kB"], ["s", "1", "1.5", "kB"]]
    assert shown[8:] == [["gave", "up", "lost", "rank", "2:", "source_stalled"]]


def test_result_of_one_rank_is_told_by_origin() -> None:
    shown = rows(result_table(pulled(filled({("s", 0): 3000}, disk=1500, constant=2))))
    assert shown[1:6] == [
        ["from", "tensors", "bytes", "rate"],
        ["peers", "21", "3.0", "kB", "3.0", "kB/s"],
        ["disk", "3", "1.5", "kB", "1.5", "kB/s"],
        ["nowhere:", "one", "value", "2"],
        ["all", "26", "4.5", "kB", "2.2", "kB/s"],
    ]
    assert "source" not in {words[0] for words in shown}


def plan(reason: str) -> Plan:
    ways = (TensorWay(name="w", way="reshard", reason=reason, nbytes=12),)
    return Plan(ways=ways, copies=())


def test_plan_of_several_ranks_names_each_rank_once() -> None:
    plans = [(plan(f"because {rank}"), shells(rank).manifest) for rank in range(2)]
    shown = rows(plan_table(plans))
    assert shown[0] == ["plan", "for", "2", "ranks", "of", "org/model"]
    assert shown[2:] == [
        ["0", "reshard", "1", "12", "B", "because", "0"],
        ["1", "reshard", "1", "12", "B", "because", "1"],
    ]


def test_plan_of_one_rank_has_no_column_for_it() -> None:
    shown = rows(plan_table([(plan("why not"), shells(1).manifest)]))
    assert shown[0] == ["plan", "for", "rank", "1", "of", "org/model"]
    assert shown[1:] == [["way", "tensors", "bytes", "why"], ["reshard", "1", "12", "B", "why", "not"]]


def test_rank_has_a_bar_once_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(output, "stderr", Console(file=screen, force_terminal=True, width=120))
    done = RankProgress(state=TransferState.READY, bytes_total=10, bytes_peer=10)
    with rank_bars("pulling", enabled=True) as moved:
        moved(2, done)
        moved(0, done)
    text = screen.getvalue()
    assert "pulling rank 2" in text
    assert "pulling rank 0" in text
    assert "pulling rank 1" not in text
