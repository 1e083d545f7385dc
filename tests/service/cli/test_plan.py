"""`weightwire plan`: between topologies without a service, and with one for targets that are not there yet."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, cast

import pytest
from rich.console import Console

from tests.faults.checkpoints import DECODER, EXPERTS, decoder, write_checkpoint
from weightwire.service.cli import plan, plan_tables
from weightwire.service.cli.main import run
from weightwire.service.client.api import RankBinding, ServiceClient
from weightwire.service.server import running_service
from weightwire.service.settings import Settings
from weightwire.transfer.manifest import Topology
from weightwire.transfer.topology_plan import Side, describe_model, trace_rank

Json: TypeAlias = dict[str, object]
MEMBERS = {
    *("seconds_trace", "seconds_trace_source", "seconds_plan", "copies", "segments", "bytes", "ways"),
    *("bytes_per_source_rank", "bytes_per_target_rank", "uncovered", "opaque", "error"),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A command sets up logging for its process, which is that of the tests here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return configured(tmp_path / "dense", DECODER)


def configured(folder: Path, members: object) -> Path:
    """A folder with a configuration, and nothing else."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(cast(Json, members))))
    return folder


@pytest.fixture
def answered(capsys: pytest.CaptureFixture[str]) -> Callable[..., Json]:
    def ask(*arguments: object, code: int = 0) -> Json:
        assert run(["plan", *map(str, arguments), "--json"]) == code
        printed = capsys.readouterr()
        answer: Json = json.loads(printed.out)
        return answer

    return ask


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def ask(*arguments: object, width: int = 80) -> str:
        screen = io.StringIO()
        monkeypatch.setattr(plan_tables, "stdout", Console(file=screen, width=width))
        assert run(["plan", *map(str, arguments)]) == 0
        return screen.getvalue()

    return ask


# -- without a service --


def test_offline_plan_prints_the_members_of_its_contract(answered: Callable[..., Json], dense: Path) -> None:
    answer = answered("--config", dense, "--from", "tp=2", "--to", "tp=1,pp=2")
    assert answer.keys() == MEMBERS
    ways = cast("dict[str, int]", answer["ways"])
    assert ways.keys() == {"identical", "reshard", "disk", "constant"}
    assert (ways["disk"], answer["uncovered"], answer["opaque"], answer["error"]) == (0, [], [], None)
    assert answer["segments"] == answer["copies"]
    for side in ("bytes_per_source_rank", "bytes_per_target_rank"):
        sums = cast("dict[str, int]", answer[side])
        assert list(sums) == ["0", "1"]
        assert sum(sums.values()) == answer["bytes"]
    for figure in ("seconds_trace", "seconds_trace_source", "seconds_plan"):
        assert cast(float, answer[figure]) > 0


def test_offline_plan_of_one_rank_is_its_part_of_the_whole(answered: Callable[..., Json], dense: Path) -> None:
    asked = ("--config", dense, "--from", "tp=2", "--to", "tp=2,pp=2")
    whole, part = answered(*asked), answered(*asked, "--rank", 2)
    taken = cast("dict[str, int]", whole["bytes_per_target_rank"])["2"]
    assert (part["bytes"], part["bytes_per_target_rank"]) == (taken, {"2": taken})


def test_offline_plan_needs_the_flags_of_both_sides(answered: Callable[..., Json], tmp_path: Path) -> None:
    folder = configured(tmp_path / "m", EXPERTS)
    (tmp_path / "map.json").write_text("[[0, 1], [3, 2, 3]]")
    mapped, plain = ("--to", "tp=2,ep=2", "--expert-map", tmp_path / "map.json"), ("--to", "tp=2,ep=2")
    more, less = (
        answered("--config", folder, "--from", "tp=1", *mapped),
        answered("--config", folder, "--from", "tp=1", *plain),
    )
    # Two layers, three matrices of 6 x 16 of bfloat16.
    assert cast(int, more["bytes"]) - cast(int, less["bytes"]) == 2 * 3 * 6 * 16 * 2
    source = ("--from", "tp=2,ep=2", "--from-expert-map", tmp_path / "map.json", "--from-vocab-multiple", 32)
    again = answered("--config", folder, *source, "--to", "tp=1", "--vocab-multiple", 1)
    assert cast("dict[str, int]", again["ways"])["disk"] == 0
    odd = configured(tmp_path / "odd", {**DECODER, "num_key_value_heads": 4})
    answered("--config", odd, "--from", "tp=3", "--from-pad-heads", "--to", "tp=2")
    refused = answered("--config", odd, "--from", "tp=2", "--to", "tp=3", code=1)
    assert cast(Json, refused["error"])["code"] == "topology_impossible"
    answered("--config", odd, "--from", "tp=2", "--to", "tp=3", "--pad-heads")


def test_offline_plan_takes_headers_that_are_there(answered: Callable[..., Json], tmp_path: Path) -> None:
    content = decoder()
    content["model.layers.0.odd.weight"] = content["model.norm.weight"]
    folder = write_checkpoint(tmp_path / "full", content, DECODER)
    asked = ("--config", folder, "--from", "tp=1", "--to", "tp=2")
    assert cast(Json, answered(*asked, code=1)["error"])["code"] == "names_unexpected"
    assert answered(*asked, "--unexpected", "warn")["error"] is None


BOTH = ("--config", "DIR", "--from", "tp=1", "--to", "tp=2")
ONLINE = ("--model", "m")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(("--config", "DIR"), "--from and --to", id="nothing to plan"),
        pytest.param(("--config", "DIR", "--from", "tp=2"), "--to", id="no target"),
        pytest.param(("--config", "DIR", "--from", "tp=2", "--to", "tp=0"), "--to 'tp=0'", id="no topology"),
        pytest.param(("--config", "DIR", "--from", "2", "--to", "tp=2"), "--from '2'", id="a bare number"),
        pytest.param((*BOTH, "--rank", "2"), "0 to 1", id="no such rank"),
        pytest.param((*BOTH, "--unexpected", "x"), "--unexpected", id="no policy"),
        pytest.param((*ONLINE, "--from", "tp=1", "--to", "tp=2"), "--config", id="a source that runs"),
        pytest.param((*ONLINE, "--from-pad-heads", "--to", "tp=2"), "--config", id="padding of a source that runs"),
        pytest.param((*ONLINE, "--rank", "1"), "--to", id="a rank of what"),
        pytest.param((*ONLINE, "--pad-heads"), "--to", id="padding of what"),
        pytest.param(("--to", "tp=2"), "--model", id="no model"),
        pytest.param((), "--model", id="nothing"),
    ],
)
def test_flags_that_do_not_go_together_are_wrong_usage(
    answered: Callable[..., Json], dense: Path, flags: tuple[str, ...], words: str
) -> None:
    answer = answered(*(str(dense) if flag == "DIR" else flag for flag in flags), code=2)
    assert words in str(cast(Json, answer["error"])["detail"])


# -- tables --


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_fit_the_terminal_and_cut_nothing_off(shown: Callable[..., str], tmp_path: Path, width: int) -> None:
    folder = configured(tmp_path / "m", {**EXPERTS, "num_hidden_layers": 12})
    text = shown("--config", folder, "--from", "tp=2", "--to", "tp=1,pp=2", width=width)
    tables = [line for line in text.splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, tables)) <= width
    assert "…" not in text
    flat = " ".join(text.replace("│", " ").split())
    assert "tp=2 to pp=2" in flat
    # The experts of twelve layers are one line, with the ranks that they lie on.
    assert "6 x model.layers.*.mlp.experts.w13_weight, rank 0" not in flat
    assert "12 x model.layers.*.mlp." in flat
    assert "cut out of what the sources hold" in flat
    assert "2 source ranks traced" in flat


def test_what_has_no_source_is_listed_with_its_reason(shown: Callable[..., str], tmp_path: Path) -> None:
    view = plan_tables.PlanView(
        title="t", sources={"0": 1}, targets={0: 1, 1: 1}, figures="",
        tensors=[
            plan_tables.TensorRow(rank=rank, name=f"t{number}", way="disk", nbytes=4, reason="no source holds it")
            for rank in range(2) for number in range(23)
        ],
        odd=[
            plan_tables.OddRow(side="target", rank=rank, name="[odd]", what="opaque: computed") for rank in (0, 1, 3)
        ],
    )  # fmt: skip
    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_tables, "stdout", Console(file=screen, width=80))
        plan_tables.print_plan(view)
    lines = screen.getvalue().splitlines()
    assert "  disk: t0, ranks 0-1 (no source holds it)" in lines
    assert "  and 3 more from disk" in lines
    assert "  [odd] (target, ranks 0-1, 3) is opaque: computed" in lines


def test_terminal_sees_what_is_going_on(
    shown: Callable[..., str], dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(plan, "stderr", Console(file=screen, force_terminal=True, width=100))
    shown("--config", dense, "--from", "tp=2", "--to", "tp=1")
    assert "tracing target rank 0 of 1" in screen.getvalue()


# -- with a service --


@pytest.fixture
def service(dense: Path) -> Iterator[str]:
    """One that knows a source of two ranks."""
    identity = replace(describe_model(dense), model="org/tiny", revision="r1")
    with running_service(Settings(port=0)) as url, ServiceClient(url) as client:
        ranks = [RankBinding(instance_id="s", generation=1, rank=rank, url="http://127.0.0.1:7000") for rank in (0, 1)]
        topology = Topology(tp=2)
        client.register_ranks(ranks, model="org/tiny", revision="r1", topology=topology)
        for rank, binding in enumerate(ranks):
            manifest = trace_rank(identity, Side(topology=topology), rank).manifest
            client.publish(binding, manifest, weight_version=1)
        yield url


def test_online_plan_for_a_topology_takes_what_the_source_has_published(
    answered: Callable[..., Json], service: str, dense: Path
) -> None:
    answer = answered("--service", service, "--model", "org/tiny", "--to", "tp=1,pp=2")
    assert answer.keys() > MEMBERS
    offline = answered("--config", dense, "--from", "tp=2", "--to", "tp=1,pp=2")
    same = MEMBERS - {"seconds_trace", "seconds_trace_source", "seconds_plan"}
    assert {name: answer[name] for name in same} == {name: offline[name] for name in same}
    assert (answer["seconds_trace_source"], answer["weight_version"]) == (0.0, 1)
    one = answered("--service", service, "--model", "org/tiny", "--to", "tp=1,pp=2", "--rank", 1)
    assert list(cast(Json, one["bytes_per_target_rank"])) == ["1"]


def test_online_plan_for_a_topology_takes_a_local_checkpoint(
    answered: Callable[..., Json], service: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "full", decoder(), DECODER)
    asked = ("--service", service, "--model", "org/tiny", "--checkpoint", folder, "--to", "tp=1")
    assert cast("dict[str, int]", answered(*asked, "--revision", "r1")["ways"])["reshard"] > 0
    other = answered(*asked, code=0)
    # By its own revision the source is another model.
    assert cast("list[Json]", other["reasons"])[0]["instance_id"] == "s"
    assert cast("dict[str, int]", other["ways"])["disk"] > 0


def test_online_plan_without_a_topology_is_for_a_second_instance_of_the_source(
    answered: Callable[..., Json], shown: Callable[..., str], service: str
) -> None:
    answer = answered("--service", service, "--model", "org/tiny")
    ways = cast("dict[str, int]", answer["ways"])
    assert (ways["reshard"], ways["disk"]) == (0, 0)
    text = shown("--service", service, "--model", "org/tiny")
    assert "s rank 1" in text
    assert "same layout" in text


def test_online_plan_of_an_unknown_model_fails(answered: Callable[..., Json], service: str) -> None:
    for more in ((), ("--to", "tp=2")):
        answer = answered("--service", service, "--model", "nobody", *more, code=1)
        error = cast(Json, answer["error"])
        assert error["code"] == "not_found"
        assert "no instance has it; start `weightwire source`, or plan with --checkpoint" in str(error["detail"])


@pytest.mark.parametrize(("copies", "words"), [(1, "1 copy, 8 B;"), (2, "2 copies, 8 B;")])
def test_figures_count_in_plain_english(copies: int, words: str) -> None:
    answer: Json = {
        "tensors": [], "sources": [], "opaque": [], "uncovered": [], "bytes_per_target_rank": {},
        "copies": copies, "bytes": 8, "seconds_trace": 0.0, "seconds_plan": 0.0,
    }  # fmt: skip
    assert plan_tables.view_of_answer("t", answer).figures.startswith(words)
