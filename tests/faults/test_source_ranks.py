"""`weightwire source` for ranks of a topology: all in one process, or each in its own, with one dying on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import httpx
import pytest

from tests.faults.checkpoints import DECODER, EXPERTS, Content, decoder, read_file, write_checkpoint
from tests.faults.processes import Json, Lab, Running, wait_until
from weightwire.service.client import ServiceClient


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written."""
    return write_checkpoint(tmp_path_factory.mktemp("dense"), decoder(), DECODER)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written."""
    return write_checkpoint(tmp_path_factory.mktemp("experts"), decoder(num_experts=4), EXPERTS)


@pytest.fixture
def client(served: Lab) -> Iterator[ServiceClient]:
    with ServiceClient(served.service) as client:
        yield client


def ranks_of(line: Json) -> dict[int, str]:
    """URL by rank, as a ready line tells them."""
    assert line["ready"] is True, line
    return {cast(int, rank["rank"]): str(rank["url"]) for rank in cast("list[Json]", line["ranks"])}


def exported(url: str, rank: int, folder: Path) -> dict[str, Content]:
    """What a source gives out as the file of one rank."""
    answer = httpx.get(f"{url}/v1/export.safetensors?rank={rank}")
    assert answer.status_code == 200, answer.text
    path = folder / f"exported-{rank}.safetensors"
    path.write_bytes(answer.content)
    return read_file(path)


def held(client: ServiceClient, model: str) -> dict[int, Json]:
    """What the service knows of each rank of the only source, once it is ready."""
    (source,) = client.sources(model)
    assert source["state"] == "ready", source
    return {cast(int, rank["rank"]): rank for rank in cast("list[Json]", source["ranks"])}


TOPOLOGIES = [
    pytest.param(("--tp", 2, "--pp", 2), range(4), id="two by two"),
    pytest.param(("--tp", 1), range(1), id="one rank, by runtime names"),
    pytest.param(("--tp", 2, "--vocab-multiple", 8), range(2), id="less padding"),
]


@pytest.mark.parametrize(("flags", "ranks"), TOPOLOGIES)
def test_one_process_serves_every_rank_on_one_port_as_load_saves_it(
    served: Lab, client: ServiceClient, dense: Path, tmp_path: Path, flags: tuple[object, ...], ranks: range
) -> None:
    line = served.source(dense, *flags).line()
    urls = ranks_of(line)
    assert urls == dict.fromkeys(ranks, str(line["url"]))
    served.run("load", dense, *flags, "--save", tmp_path / "out", "--json").check(0)
    for rank, url in urls.items():
        assert exported(url, rank, tmp_path) == read_file(tmp_path / "out" / f"rank-{rank}.safetensors")
    assert httpx.get(f"{line['url']}/readyz").json()["ranks"] == list(ranks)
    assert len({rank["generation"] for rank in held(client, served.model).values()}) == 1


def test_experts_lie_as_the_map_says(served: Lab, experts: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text("[[0, 1], [3, 2, 3]]")
    flags = ("--tp", 2, "--ep", 2, "--expert-map", tmp_path / "map.json")
    urls = ranks_of(served.source(experts, *flags).line())
    served.run("load", experts, *flags, "--save", tmp_path / "out", "--json").check(0)
    for rank, url in urls.items():
        assert exported(url, rank, tmp_path) == read_file(tmp_path / "out" / f"rank-{rank}.safetensors")


def test_manifests_say_whose_ranks_they_are(served: Lab, client: ServiceClient, dense: Path) -> None:
    served.source(dense, "--tp", 2, "--revision", "r7").line()
    for number, rank in held(client, served.model).items():
        manifest = client.manifest(str(rank["manifest_digest"]))
        assert (manifest.model, manifest.revision, manifest.rank) == (served.model, "r7", number)
        assert (manifest.topology.tp, manifest.topology.pp) == (2, 1)
        assert {spec.name for spec in manifest.checkpoint} == set(decoder())
        assert json.loads(str(manifest.config))["hidden_size"] == DECODER["hidden_size"]


def placed(client: ServiceClient, model: str) -> dict[str, set[str]]:
    """Of the only rank of the only source: the checkpoint names that lie in each runtime tensor."""
    (rank,) = held(client, model).values()
    manifest = client.manifest(str(rank["manifest_digest"]))
    return {tensor.name: {piece.name for piece in tensor.placement} for tensor in manifest.tensors}


def test_exclude_takes_slots_out_of_fused_shells_and_whole_shells_away(
    served: Lab, client: ServiceClient, dense: Path
) -> None:
    patterns = ("model.layers.0.*.k_proj.weight", "model.layers.1.mlp.*_proj.weight", "model.norm.weight")
    served.source(dense, "--tp", 1, *(flag for pattern in patterns for flag in ("--exclude", pattern))).line()
    found = placed(client, served.model)
    path = "model.layers.0.self_attn"
    assert found[f"{path}.qkv_proj.weight"] == {f"{path}.{part}_proj.weight" for part in "qv"}
    assert len(found["model.layers.1.self_attn.qkv_proj.weight"]) == 3
    gone = {"model.layers.1.mlp.gate_up_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"}
    assert gone.isdisjoint(found)
    names = {name for names in found.values() for name in names}
    left_out = {f"{path}.k_proj.weight", "model.norm.weight"}
    left_out |= {f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert names == set(decoder()) - left_out


def test_exclude_of_everything_leaves_nothing_to_serve(served: Lab, client: ServiceClient, dense: Path) -> None:
    outcome = served.source(dense, "--tp", 1, "--exclude", "*").finish()
    outcome.check(1)
    assert outcome.error["code"] == "checkpoint_not_found"
    assert client.instances() == []


# Refused before anything is loaded


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(("--tp", 3), ("LlamaForCausalLM", "rank 0", "2 key-value heads", "3"),
                     id="heads that do not divide"),
        pytest.param(("--pp", 3), ("LlamaForCausalLM", "rank 0", "pp=3", "2 layers"), id="more stages than layers"),
    ],
)  # fmt: skip
def test_topology_that_the_model_cannot_have_is_refused_before_the_service_hears_of_it(
    served: Lab, client: ServiceClient, dense: Path, flags: tuple[object, ...], words: tuple[str, ...]
) -> None:
    outcome = served.source(dense, *flags).finish()
    outcome.check(1)
    assert outcome.error["code"] == "topology_impossible"
    assert [word for word in words if word not in str(outcome.error["detail"])] == []
    assert client.instances() == []


@pytest.mark.parametrize("text", ["[[0, 1, 2, 3]]", "[[0, 1], [2, 3], [0]]"])
def test_expert_map_of_another_size_is_refused(
    served: Lab, client: ServiceClient, experts: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "map.json").write_text(text)
    outcome = served.source(experts, "--tp", 2, "--ep", 2, "--expert-map", tmp_path / "map.json").finish()
    outcome.check(1)
    assert outcome.error["code"] == "topology_impossible"
    assert "expected ep=2" in str(outcome.error["detail"])
    assert client.instances() == []


def test_checkpoint_without_a_config_has_no_topology(
    served: Lab, client: ServiceClient, dense: Path, tmp_path: Path
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").symlink_to(dense / "model.safetensors")
    outcome = served.source(tmp_path / "bare", "--tp", 2).finish()
    outcome.check(1)
    assert outcome.error["code"] == "config_invalid"
    assert "config.json" in str(outcome.error["detail"])
    assert client.instances() == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(("--tp", 2, "--rank", 1), "--instance-id", id="a rank that the others could not find"),
        pytest.param(("--tp", 2, "--rank", 2, "--instance-id", "x"), "0 to 1", id="a rank outside"),
        pytest.param(("--rank", 1), "--tp", id="a rank without a topology"),
        pytest.param(("--pad-heads",), "--pad-heads", id="padding without a topology"),
        pytest.param(("--tp", 2, "--ep", 3), "--ep", id="groups that do not divide"),
        pytest.param(("--unexpected", "ignore"), "--unexpected", id="no policy"),
        pytest.param(("--staging", "never"), "--staging", id="no way to stage"),
    ],
)
def test_flags_that_do_not_go_together_are_wrong_usage(
    served: Lab, client: ServiceClient, dense: Path, flags: tuple[object, ...], words: str
) -> None:
    outcome = served.source(dense, *flags).finish()
    outcome.check(2)
    assert words in str(outcome.error["detail"])
    assert client.instances() == []


# Ranks in several processes


class Pair:
    """One instance of two ranks, each a process of its own."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        lab.serve("--lease-s", 0.5)
        self._lab = lab
        self._folder = folder

    def start(self, rank: int, *flags: object) -> Running:
        return self._lab.source(self._folder, "--tp", 2, "--rank", rank, "--instance-id", "pair", *flags)

    def ready(self, rank: int, *flags: object) -> Running:
        running = self.start(rank, *flags)
        assert list(ranks_of(running.line())) == [rank]
        return running

    @property
    def source(self) -> Json:
        with ServiceClient(self._lab.service) as client:
            (source,) = client.sources(self._lab.model)
        return source

    @property
    def generations(self) -> list[object]:
        return [rank["generation"] for rank in cast("list[Json]", self.source["ranks"])]


@pytest.fixture
def pair(lab: Lab, dense: Path) -> Pair:
    return Pair(lab, dense)


def test_instance_of_two_processes_comes_back_when_one_is_killed_and_restarted(pair: Pair) -> None:
    pair.ready(0)
    assert (pair.source["state"], pair.source["epoch"]) != ("ready", 1)
    second = pair.ready(1)
    assert (pair.source["state"], pair.source["epoch"]) == ("ready", 1)
    before = pair.generations
    second.kill()
    wait_until(lambda: pair.source["state"] != "ready")
    assert "rank 1" in str(pair.source["reason"])
    pair.ready(1)
    assert (pair.source["state"], pair.source["epoch"]) == ("ready", 1)
    after = pair.generations
    assert after[0] == before[0]
    assert cast(int, after[1]) > cast(int, before[1])


def test_instance_of_two_processes_comes_back_at_once_when_one_stops_and_starts_again(pair: Pair) -> None:
    first = pair.ready(0)
    pair.ready(1)
    assert first.stop() == 0
    assert pair.source["state"] != "ready"
    pair.ready(0)
    assert pair.source["state"] == "ready"


def test_higher_epoch_takes_the_place_of_every_process_of_the_one_before(pair: Pair) -> None:
    older = [pair.ready(0), pair.ready(1)]
    pair.ready(1, "--epoch", 2)
    for running in older:
        outcome = running.finish()
        assert outcome.code == 1
        assert [line for line in outcome.lines if '"conflict"' in line]
    outcome = pair.start(0).finish()
    outcome.check(1)
    assert outcome.error["code"] == "conflict"
    assert "epoch 1 is stale" in str(outcome.error["detail"])
    pair.ready(0, "--epoch", 2)
    assert (pair.source["state"], pair.source["epoch"]) == ("ready", 2)


@pytest.mark.parametrize("flags", [pytest.param((), id="plain"), pytest.param(("--tp", 2), id="ranks")])
def test_epoch_may_come_from_the_environment(
    served: Lab, client: ServiceClient, dense: Path, flags: tuple[object, ...]
) -> None:
    served.source(dense, *flags, env={"WEIGHTWIRE_EPOCH": "41"}).line()
    assert [source["epoch"] for source in client.sources(served.model)] == [41]


def test_restart_of_all_ranks_in_one_process_is_a_new_epoch(served: Lab, client: ServiceClient, dense: Path) -> None:
    flags = ("--tp", 2, "--instance-id", "whole")
    served.source(dense, *flags).line()
    (first,) = client.sources(served.model)
    served.source(dense, *flags).line()
    (second,) = client.sources(served.model)
    assert (second["state"], first["state"]) == ("ready", "ready")
    assert cast(int, second["epoch"]) > cast(int, first["epoch"])
