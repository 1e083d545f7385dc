"""Flags of a topology, as values or as errors of usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weightwire.service.cli.topology import (
    build_options,
    check_can_be_found,
    check_unused,
    chosen_epoch,
    chosen_ranks,
    chosen_topology,
)
from weightwire.transfer.errors import CheckpointError, SettingsError
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "expected"),
    [
        pytest.param(None, None, None, None, id="no flag is the plain tree"),
        pytest.param(1, None, None, Topology(), id="any flag is a topology, even of one rank"),
        pytest.param(None, 1, None, Topology(), id="stages alone"),
        pytest.param(None, None, 1, Topology(), id="expert groups alone"),
        pytest.param(None, 3, None, Topology(pp=3), id="what is not said is 1"),
        pytest.param(8, 2, 4, Topology(tp=8, pp=2, ep=4), id="all of them"),
    ],
)
def test_topology_is_chosen_by_any_of_its_flags(
    tp: int | None, pp: int | None, ep: int | None, expected: Topology | None
) -> None:
    assert chosen_topology(tp=tp, pp=pp, ep=ep) == expected


def test_topology_that_cannot_be_is_wrong_usage() -> None:
    with pytest.raises(SettingsError, match=r"^--tp, --pp, --ep: .*tp=2 pp=1 ep=3.* ep dividing tp"):
        chosen_topology(tp=2, pp=None, ep=3)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [("all", range(6)), ("0", range(1)), ("5", range(5, 6)), ("05", range(5, 6))],
)
def test_ranks_are_one_or_all(rank: str, expected: range) -> None:
    assert chosen_ranks(rank, Topology(tp=3, pp=2)) == expected


@pytest.mark.parametrize("rank", ["6", "-1", "", "one", "1,2", "1.0", "٣", "²", "All"])
def test_rank_that_is_none_is_wrong_usage(rank: str) -> None:
    with pytest.raises(SettingsError, match="expected all, or 0 to 5"):
        chosen_ranks(rank, Topology(tp=3, pp=2))


def test_options_of_the_layout_are_those_of_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text("[[0, 1, 0], [2]]")
    assert build_options(vocab_multiple=None, pad_heads=False, expert_map=None) == BuildOptions()
    assert build_options(vocab_multiple=8, pad_heads=True, expert_map=file) == BuildOptions(
        vocab_multiple=8, pad_heads=True, expert_map=((0, 1, 0), (2,))
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("[[0, 1]", id="cut off"),
        pytest.param("{}", id="an object"),
        pytest.param("[0, 1]", id="one list"),
        pytest.param("[[0], 1]", id="a number among the lists"),
        pytest.param("[[0.0]]", id="a fraction"),
        pytest.param('[["0"]]', id="text"),
        pytest.param("[[true]]", id="a boolean"),
        pytest.param("[[null]]", id="nothing"),
        pytest.param("[" * 100_000, id="deeper than anybody reads"),
    ],
)
def test_file_that_is_no_expert_map_is_wrong_usage(tmp_path: Path, text: str) -> None:
    file = tmp_path / "map.json"
    file.write_text(text)
    with pytest.raises(SettingsError, match="expected a JSON list of lists of expert numbers"):
        build_options(vocab_multiple=None, pad_heads=False, expert_map=file)


def test_expert_map_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"map\.json"):
        build_options(vocab_multiple=None, pad_heads=False, expert_map=tmp_path / "map.json")


@pytest.mark.parametrize(
    ("rank", "options", "named"),
    [
        pytest.param("1", BuildOptions(), "--rank:", id="a rank"),
        pytest.param("all", BuildOptions(vocab_multiple=64), "--vocab-multiple:", id="padding of the vocabulary"),
        pytest.param("all", BuildOptions(pad_heads=True), "--pad-heads:", id="padding of heads"),
        pytest.param("all", BuildOptions(expert_map=((0,),)), "--expert-map:", id="an expert map"),
        pytest.param("x", BuildOptions(pad_heads=True), "--rank, --pad-heads:", id="two at once"),
    ],
)
def test_flag_without_its_topology_is_wrong_usage(rank: str, options: BuildOptions, named: str) -> None:
    with pytest.raises(SettingsError, match=f"^{named} .*expected one of --tp, --pp, --ep"):
        check_unused(rank=rank, options=options)


@pytest.mark.parametrize("rank", ["all", "0"])
def test_whole_checkpoint_is_rank_0_of_1(rank: str) -> None:
    check_unused(rank=rank, options=BuildOptions())


def test_expert_map_is_read_as_json_has_it(tmp_path: Path) -> None:
    slots = [[expert % 7 for expert in range(9)], [], [6]]
    (tmp_path / "map.json").write_text(json.dumps(slots))
    options = build_options(vocab_multiple=None, pad_heads=False, expert_map=tmp_path / "map.json")
    assert [list(rank) for rank in options.expert_map or ()] == slots


def test_numbers_of_thousands_of_digits_are_refused() -> None:
    with pytest.raises(SettingsError, match="expected all, or 0 to 5"):
        chosen_ranks("9" * 5000, Topology(tp=3, pp=2))
    with pytest.raises(SettingsError, match="more than 1048576 ranks"):
        chosen_topology(tp=10**4000, pp=10**4000, ep=None)
    with pytest.raises(SettingsError, match="--vocab-multiple"):
        build_options(vocab_multiple=10**4000, pad_heads=False, expert_map=None)


@pytest.mark.parametrize(
    ("epoch", "ranks", "expected"),
    [
        pytest.param(None, range(4), None, id="all ranks: that of the process"),
        pytest.param(None, range(1, 2), 1, id="one of several: a number that all can know"),
        pytest.param(7, range(4), 7, id="as it is told, for all ranks"),
        pytest.param(0, range(3, 4), 0, id="as it is told, for one"),
    ],
)
def test_epoch_is_common_to_the_processes_of_an_instance(epoch: int | None, ranks: range, expected: int | None) -> None:
    assert chosen_epoch(epoch, ranks=ranks, topology=Topology(tp=2, pp=2)) == expected


def test_rank_of_several_needs_a_name_that_the_others_know() -> None:
    with pytest.raises(SettingsError, match=r"^--rank 2: the other 3 ranks .* expected --instance-id"):
        check_can_be_found(None, ranks=range(2, 3), topology=Topology(tp=4))
    with pytest.raises(SettingsError, match="the other rank is another process, expected --instance-id"):
        check_can_be_found(None, ranks=range(1, 2), topology=Topology(tp=2))
    check_can_be_found("x", ranks=range(2, 3), topology=Topology(tp=4))
    check_can_be_found(None, ranks=range(4), topology=Topology(tp=4))
    check_can_be_found(None, ranks=range(1), topology=Topology())
