"""`weightwire pull` for ranks of a topology, from sources of others: what is filled, what it says, and what dies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

import httpx
import pytest

from tests.faults.checkpoints import (
    DECODER,
    EXPERTS,
    Content,
    check_saved,
    content,
    decoder,
    write_checkpoint,
)
from tests.faults.processes import Json, Lab, Outcome, Running, wait_until
from tests.faults.proxy import Proxy
from weightwire.service.client import ServiceClient

RANK = {"rank", "state", "seconds", "verified", "transport", "bytes_peer", "bytes_disk", "tensors", "sources",
        "bytes_received"}  # fmt: skip
NO_TENSORS = {"identical": 0, "reshard": 0, "disk": 0, "constant": 0}

# 12 MiB, so that a transfer has a middle.
LARGE: Mapping[str, object] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        "dtype": "bfloat16",
    }
)


def large_decoder() -> dict[str, Content]:
    """The checkpoint that `LARGE` describes."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (1000, 512), "model.norm.weight": (512,), "lm_head.weight": (1000, 512),
    }  # fmt: skip
    for layer in range(2):
        path = f"model.layers.{layer}"
        shapes |= {f"{path}.{norm}_layernorm.weight": (512,) for norm in ("input", "post_attention")}
        shapes |= {
            f"{path}.self_attn.{part}_proj.weight": (rows, 512)
            for part, rows in zip("qkvo", (512, 256, 256, 512), strict=True)
        }
        shapes |= {f"{path}.mlp.{part}_proj.weight": (1024, 512) for part in ("gate", "up")}
        shapes[f"{path}.mlp.down_proj.weight"] = (512, 1024)
    return {name: content("BF16", *shape, seed=number) for number, (name, shape) in enumerate(shapes.items())}


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written."""
    return write_checkpoint(tmp_path_factory.mktemp("dense"), decoder(), DECODER)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written."""
    return write_checkpoint(tmp_path_factory.mktemp("experts"), decoder(num_experts=4), EXPERTS)


@pytest.fixture(scope="session")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written."""
    return write_checkpoint(tmp_path_factory.mktemp("heavy"), large_decoder(), LARGE)


def check_as_loaded(lab: Lab, folder: Path, out: Path, *flags: object) -> None:
    """Check that `out` holds, byte for byte, the files that `load --save` writes from the checkpoint itself."""
    loaded = out.with_name(f"{out.name}-loaded")
    lab.run("load", folder, *flags, "--save", loaded, "--json").check(0)
    expected = {path.name: path.read_bytes() for path in loaded.iterdir()}
    assert {path.name: path.read_bytes() == expected.get(path.name) for path in out.iterdir()} == dict.fromkeys(
        expected, True
    )


def check_ready(answer: Json) -> tuple[int, int]:
    """Check that totals are those of the ranks; returns the bytes from peers and from disk."""
    assert (answer["state"], answer["verified"], answer["error"]) == ("ready", True, None)
    ranks = cast("list[Json]", answer["ranks"])
    for rank in ranks:
        assert rank.keys() == RANK
        assert (rank["state"], rank["verified"]) == ("ready", True)
        assert rank["bytes_peer"] == sum(given_by(rank).values())
    for key in ("bytes_peer", "bytes_disk", "bytes_received"):
        assert answer[key] == sum(cast(int, rank[key]) for rank in ranks)
    for way, count in cast("dict[str, int]", answer["tensors"]).items():
        assert count == sum(cast("dict[str, int]", rank["tensors"])[way] for rank in ranks)
    given = given_by(answer)
    assert given == {
        key: sum(given_by(rank).get(key, 0) for rank in ranks)
        for key in {key for rank in ranks for key in given_by(rank)}
    }
    return cast(int, answer["bytes_peer"]), cast(int, answer["bytes_disk"])


def given_by(answer: Json) -> dict[tuple[str, int], int]:
    """Bytes by source instance and rank."""
    sources = cast("list[Json]", answer["sources"])
    return {(str(s["instance_id"]), cast(int, s["rank"])): cast(int, s["bytes"]) for s in sources}


def ways(answer: Json) -> dict[str, int]:
    return cast("dict[str, int]", answer["tensors"])


# Any topology to any topology, bit for bit

DENSE_PAIRS = [
    pytest.param(("--tp", 2), ("--tp", 4), id="wider, with key-value heads on two ranks each"),
    pytest.param(("--tp", 2, "--pp", 2), ("--tp", 1), id="two by two to one"),
    pytest.param(("--tp", 1), ("--pp", 2), id="one to two stages"),
    pytest.param((), ("--tp", 2), id="plain to ranks"),
    pytest.param(("--tp", 2), ("--tp", 2, "--vocab-multiple", 22), id="the same with other padding"),
    pytest.param(("--tp", 2), ("--tp", 3, "--pad-heads", "--vocab-multiple", 3), id="to padded heads"),
]


@pytest.mark.parametrize(("source", "target"), DENSE_PAIRS)
def test_pull_fills_any_topology_from_any_other_without_a_disk(
    served: Lab, dense: Path, tmp_path: Path, source: tuple[object, ...], target: tuple[object, ...]
) -> None:
    served.ready_source(dense, *source)
    answer = served.pull(*target, "--save", tmp_path / "out").finish().check(0)
    _, disk = check_ready(answer)
    assert (disk, ways(answer)["disk"]) == (0, 0)
    check_as_loaded(served, dense, tmp_path / "out", *target)


def test_forced_staging_moves_the_same_bytes(served: Lab, dense: Path, tmp_path: Path) -> None:
    served.ready_source(dense, "--tp", 2, "--staging", "always")
    for out, flags in (("ranks", ("--tp", 3, "--pad-heads", "--vocab-multiple", 3)), ("same", ("--tp", 2))):
        answer = served.pull(*flags, "--staging", "always", "--save", tmp_path / out).finish().check(0)
        assert check_ready(answer)[1] == 0
        check_as_loaded(served, dense, tmp_path / out, *flags)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(("--tp", 2), ("--tp", 2, "--ep", 2), id="cut experts to whole ones"),
        pytest.param(("--tp", 2, "--ep", 2), ("--tp", 1), id="whole experts to one rank"),
    ],
)
def test_pull_moves_experts_between_topologies(
    served: Lab, experts: Path, tmp_path: Path, source: tuple[object, ...], target: tuple[object, ...]
) -> None:
    served.ready_source(experts, *source)
    answer = served.pull(*target, "--save", tmp_path / "out").finish().check(0)
    assert check_ready(answer)[1] == 0
    check_as_loaded(served, experts, tmp_path / "out", *target)


def test_plain_target_takes_whole_tensors_from_ranks(served: Lab, dense: Path, tmp_path: Path) -> None:
    served.ready_source(dense, "--tp", 2, "--pp", 2)
    answer = served.pull("--save", tmp_path / "out").finish().check(0)
    assert check_ready(answer)[1] == 0
    check_saved(tmp_path / "out", decoder())


def test_pull_tells_each_rank_and_the_sums(served: Lab, dense: Path) -> None:
    served.ready_source(dense, "--tp", 2, "--instance-id", "s")
    answer = served.pull("--tp", 2).finish().check(0)
    check_ready(answer)
    # Each rank finds its twin, which holds its padding as well.
    assert [given_by(rank).keys() for rank in cast("list[Json]", answer["ranks"])] == [{("s", 0)}, {("s", 1)}]
    assert ways(answer) == {**NO_TENSORS, "identical": 2 * 15}
    recorded = served.status(answer["transfer_id"])
    assert (recorded["state"], recorded["bytes_peer"]) == ("ready", answer["bytes_peer"])
    assert [rank["state"] for rank in cast("list[Json]", recorded["ranks"])] == ["ready", "ready"]


def test_pull_without_json_shows_every_rank_and_source(served: Lab, dense: Path) -> None:
    served.ready_source(dense, "--tp", 2, "--instance-id", "the-source")
    outcome = served.run("pull", "--service", served.service, "--model", served.model, "--tp", 1, "--pp", 2)
    assert outcome.code == 0, outcome.log
    text = "\n".join(outcome.lines)
    assert "plan for 2 ranks of org/model" in text
    assert text.count("the-source") == 2
    assert "every byte verified" in text


# Ranks that serve what they took


def urls_of(line: Json) -> dict[int, str]:
    assert line["ready"] is True, line
    return {cast(int, rank["rank"]): str(rank["url"]) for rank in cast("list[Json]", line["ranks"])}


def test_target_of_four_ranks_is_a_source_of_four_on_one_port(served: Lab, dense: Path, tmp_path: Path) -> None:
    first = served.ready_source(dense, "--tp", 2, "--instance-id", "first")
    relay = served.pull("--tp", 4, "--serve", "--instance-id", "relay")
    line = relay.line()
    assert urls_of(line) == dict.fromkeys(range(4), str(line["url"]))
    check_ready(cast(Json, line["pull"]))
    first.kill()
    answer = served.pull("--pp", 2, "--save", tmp_path / "out").finish().check(0)
    assert check_ready(answer)[1] == 0
    assert {instance for instance, _ in given_by(answer)} == {"relay"}
    check_as_loaded(served, dense, tmp_path / "out", "--pp", 2)
    assert relay.stop() == 0


def test_target_of_the_same_topology_has_the_manifests_of_its_source(served: Lab, dense: Path) -> None:
    served.ready_source(dense, "--tp", 2, "--instance-id", "first")
    served.pull("--tp", 2, "--serve", "--instance-id", "relay", "--checkpoint", dense).line()
    with ServiceClient(served.service) as client:
        first, relay = (
            [rank["manifest_digest"] for rank in cast("list[Json]", source["ranks"])]
            for source in sorted(client.sources(served.model), key=lambda source: str(source["instance_id"]))
        )
    assert first == relay


def test_ranks_in_two_processes_are_one_source_when_both_are_ready(served: Lab, dense: Path, tmp_path: Path) -> None:
    served.ready_source(dense, "--tp", 1, "--instance-id", "first")
    flags = ("--tp", 2, "--serve", "--instance-id", "pair", "--save", tmp_path / "out")
    lines = [served.pull(*flags, "--rank", 0).line()]
    with ServiceClient(served.service) as client:
        states = {str(s["instance_id"]): s["state"] for s in client.sources(served.model)}
        assert states["pair"] != "ready"
        lines.append(served.pull(*flags, "--rank", 1).line())
        states = {str(s["instance_id"]): s["state"] for s in client.sources(served.model)}
    assert states == {"first": "ready", "pair": "ready"}
    assert [list(urls_of(line)) for line in lines] == [[0], [1]]
    check_as_loaded(served, dense, tmp_path / "out", "--tp", 2)


def test_tensor_of_a_rank_can_be_asked_for_by_runtime_name(served: Lab, dense: Path) -> None:
    served.ready_source(dense, "--tp", 1)
    line = served.pull("--tp", 2, "--serve").line()
    answers = [
        httpx.get(f"{line['url']}/v1/tensors/model.layers.0.self_attn.qkv_proj.weight?rank={rank}").content
        for rank in range(2)
    ]
    assert answers[0] != answers[1]
    assert {len(answer) for answer in answers} == {(8 + 4 + 4) * 16 * 2}


# The disk


def test_pull_without_a_service_loads_every_rank_from_disk(lab: Lab, dense: Path, tmp_path: Path) -> None:
    flags = ("--service", "http://127.0.0.1:9", "--model", "m", "--json", "--checkpoint", dense)
    answer = lab.run("pull", *flags, "--tp", 2, "--pp", 2, "--save", tmp_path / "out").check(0)
    peer, disk = check_ready(answer)
    assert (peer, answer["transfer_id"]) == (0, None)
    assert disk > 0
    check_as_loaded(lab, dense, tmp_path / "out", "--tp", 2, "--pp", 2)


def test_slot_that_the_source_leaves_out_comes_from_disk(served: Lab, dense: Path, tmp_path: Path) -> None:
    served.ready_source(dense, "--tp", 2, "--exclude", "*k_proj*")
    answer = served.pull("--tp", 1, "--checkpoint", dense, "--save", tmp_path / "out").finish().check(0)
    _, disk = check_ready(answer)
    # The keys of both layers, and nothing else of the fused shells.
    assert disk == 2 * 8 * 16 * 2
    assert ways(answer)["disk"] == 2
    check_as_loaded(served, dense, tmp_path / "out", "--tp", 1)


def test_slot_that_nobody_has_is_named_before_a_byte_moves(served: Lab, dense: Path, tmp_path: Path) -> None:
    served.ready_source(dense, "--tp", 2, "--exclude", "*.1.*k_proj*")
    outcome = served.pull("--tp", 2, "--save", tmp_path / "out").finish()
    answer = outcome.check(1)
    assert (outcome.error["code"], answer["bytes_peer"], answer["ranks"]) == ("coverage_incomplete", 0, [])
    path = "model.layers.1.self_attn"
    assert outcome.error["missing"] == [f"{path}.qkv_proj.weight[{path}.k_proj.weight]"]
    assert served.status(answer["transfer_id"])["state"] == "failed"
    assert not (tmp_path / "out").exists()


# Sources that die


class Halves:
    """A source of two ranks, each a process of its own; the second behind the proxy."""

    def __init__(self, lab: Lab, folder: Path, proxy: Proxy) -> None:
        flags = ("--tp", 2, "--instance-id", "halves")
        self.lower = lab.ready_source(folder, *flags, "--rank", 0)
        self.upper = lab.ready_source(folder, *flags, "--rank", 1, *proxy.flags)
        self._proxy = proxy

    def lose_upper(self, target: Running) -> Outcome:
        """Kill the second rank in the middle of a pull, and wait for its end."""
        self._proxy.wait_until_held()
        self.upper.kill()
        self._proxy.release()
        return target.finish()


def test_what_a_killed_rank_had_not_given_comes_from_disk(
    served: Lab, proxy: Proxy, heavy: Path, tmp_path: Path
) -> None:
    halves = Halves(served, heavy, proxy)
    proxy.hold_after(3 << 20)
    target = served.pull("--tp", 4, "--checkpoint", heavy, "--save", tmp_path / "out")
    answer = halves.lose_upper(target).check(0)
    peer, disk = check_ready(answer)
    assert given_by(answer)["halves", 0] > 0
    assert disk > 0
    (failure,) = cast("list[Json]", answer["failures"])
    assert (failure["instance_id"], failure["rank"]) == ("halves", 1)
    assert peer > given_by(answer)["halves", 0]
    check_as_loaded(served, heavy, tmp_path / "out", "--tp", 4)


def test_what_a_killed_rank_had_not_given_comes_from_an_instance_of_another_topology(
    served: Lab, proxy: Proxy, heavy: Path, tmp_path: Path
) -> None:
    halves = Halves(served, heavy, proxy)
    served.ready_source(heavy, "--pp", 2, "--instance-id", "stages")
    proxy.hold_after(1 << 20)
    answer = halves.lose_upper(served.pull("--tp", 4, "--save", tmp_path / "out")).check(0)
    _, disk = check_ready(answer)
    assert disk == 0
    assert {instance for instance, _ in given_by(answer)} == {"halves", "stages"}
    check_as_loaded(served, heavy, tmp_path / "out", "--tp", 4)


def test_what_a_killed_rank_had_not_given_is_missing_where_there_is_nothing_else(
    served: Lab, proxy: Proxy, heavy: Path, tmp_path: Path
) -> None:
    halves = Halves(served, heavy, proxy)
    proxy.hold_after(3 << 20)
    outcome = halves.lose_upper(served.pull("--tp", 4, "--save", tmp_path / "out", "--instance-id", "t"))
    answer = outcome.check(1)
    assert (answer["state"], answer["verified"], outcome.error["code"]) == ("failed", False, "coverage_incomplete")
    assert outcome.error["missing"]
    assert str(outcome.error["detail"]).startswith(f"rank {outcome.error['target_rank']}: ")
    assert "source_unreachable" in str(outcome.error["detail"])
    ranks = cast("list[Json]", answer["ranks"])
    assert {rank["state"] for rank in ranks} <= {"ready", "failed"}
    assert answer["bytes_peer"] == sum(cast(int, rank["bytes_peer"]) for rank in ranks)
    assert not (tmp_path / "out").exists()
    recorded = served.status(answer["transfer_id"])
    assert (recorded["state"], cast(Json, recorded["error"])["code"]) == ("failed", "coverage_incomplete")


def test_ranks_are_cancelled_together(served: Lab, proxy: Proxy, heavy: Path, tmp_path: Path) -> None:
    served.ready_source(heavy, "--tp", 2, *proxy.flags)
    proxy.hold_after(2 << 20)
    target = served.pull("--tp", 2, "--save", tmp_path / "out")
    proxy.wait_until_held()
    with ServiceClient(served.service) as client:
        (transfer,) = client.transfers()
        client.cancel(str(transfer["transfer_id"]))
    outcome = target.finish()
    answer = outcome.check(3)
    proxy.release()
    assert (answer["state"], outcome.error["code"]) == ("cancelled", "cancelled")
    assert {rank["state"] for rank in cast("list[Json]", answer["ranks"])} == {"cancelled"}
    assert not (tmp_path / "out").exists()


# Refused before a byte moves


@pytest.mark.parametrize("with_disk", [True, False], ids=["by the local config", "by the config of the source"])
def test_topology_that_the_model_cannot_have_is_refused(served: Lab, dense: Path, with_disk: bool) -> None:
    served.ready_source(dense)
    outcome = served.pull("--tp", 3, *(("--checkpoint", dense) if with_disk else ())).finish()
    answer = outcome.check(1)
    assert (outcome.error["code"], outcome.error["model"]) == ("topology_impossible", "LlamaForCausalLM")
    assert (answer["bytes_peer"], answer["ranks"], answer["tensors"]) == (0, [], NO_TENSORS)
    # What the disk told, nobody was asked.
    assert (answer["transfer_id"] is None) == with_disk


def test_topology_of_a_model_without_a_config_is_refused(served: Lab, tmp_path: Path, dense: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").symlink_to(dense / "model.safetensors")
    served.ready_source(tmp_path / "bare")
    outcome = served.pull("--tp", 2).finish()
    outcome.check(1)
    assert outcome.error["code"] == "config_invalid"
    assert "config.json" in str(outcome.error["detail"])


def test_local_checkpoint_of_other_tensors_is_refused(served: Lab, dense: Path, tmp_path: Path) -> None:
    other = {**DECODER, "num_hidden_layers": 1}
    tensors = {name: tensor for name, tensor in decoder().items() if ".layers.1." not in name}
    write_checkpoint(tmp_path / "other", tensors, other)
    served.ready_source(dense, "--tp", 2, "--revision", "r")
    outcome = served.pull("--tp", 2, "--revision", "r", "--checkpoint", tmp_path / "other").finish()
    answer = outcome.check(1)
    assert (outcome.error["code"], answer["bytes_peer"]) == ("manifest_mismatch", 0)
    assert "model.layers.1." in json.dumps(outcome.error)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(("--tp", 2, "--rank", 1), "--instance-id", id="a rank that the others could not find"),
        pytest.param(("--tp", 2, "--rank", 2, "--instance-id", "x"), "0 to 1", id="a rank outside"),
        pytest.param(("--rank", 1), "--tp", id="a rank without a topology"),
        pytest.param(("--vocab-multiple", 8), "--vocab-multiple", id="padding without a topology"),
        pytest.param(("--tp", 2, "--ep", 3), "--ep", id="groups that do not divide"),
        pytest.param(("--tp", 2, "--unexpected", "ignore"), "--unexpected", id="no policy"),
        pytest.param(("--staging", "never"), "--staging", id="no way to stage"),
        pytest.param(
            ("--tp", 2, "--expert-map", "FOLDER/config.json"), "--expert-map", id="an expert map that is none"
        ),
    ],
)
def test_pull_exits_2_on_wrong_usage_with_its_members(
    served: Lab, dense: Path, flags: tuple[object, ...], words: str
) -> None:
    outcome = served.pull(*(str(flag).replace("FOLDER", str(dense)) for flag in flags)).finish()
    answer = outcome.check(2)
    assert words in str(outcome.error["detail"])
    assert (answer["transfer_id"], answer["state"], answer["ranks"]) == (None, "failed", [])


def test_source_that_lost_a_rank_is_not_granted(served: Lab, dense: Path) -> None:
    """A topology with a hole has not all elements: it is passed over, and the reason names the rank."""
    served.ready_source(dense, "--tp", 2, "--instance-id", "half", "--rank", 0)
    outcome = served.pull("--tp", 1).finish()
    outcome.check(1)
    assert outcome.error["code"] == "not_found"
    assert "half" in str(outcome.error["detail"])
    assert "rank 1" in str(outcome.error["detail"])


def test_pull_of_one_rank_of_a_restarted_instance_leaves_the_others_alone(
    served: Lab, dense: Path, tmp_path: Path
) -> None:
    served.ready_source(dense, "--tp", 1, "--instance-id", "first")
    flags = ("--tp", 2, "--serve", "--instance-id", "pair")
    lower = served.pull(*flags, "--rank", 0)
    lower.line()
    upper = served.pull(*flags, "--rank", 1)
    upper.line()
    upper.kill()
    served.pull(*flags, "--rank", 1).line()
    with ServiceClient(served.service) as client:
        wait_until(lambda: {str(s["state"]) for s in client.sources(served.model)} == {"ready"})
    answer = served.pull("--save", tmp_path / "out").finish().check(0)
    assert check_ready(answer)[1] == 0
    check_saved(tmp_path / "out", decoder())
