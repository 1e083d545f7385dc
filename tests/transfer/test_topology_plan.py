"""Plans between topologies of models that are known by a config.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.faults.checkpoints import DECODER, EXPERTS, decoder, write_checkpoint
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.errors import CheckpointError, ConfigError, NamesError, TopologyError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.loading.base_loaders import WholeLoader
from weightwire.transfer.loading.slots import SlotId, attach_loader
from weightwire.transfer.manifest import CheckpointSpec, Topology
from weightwire.transfer.models import Blueprint, BuildOptions, LlamaForCausalLM, registers_architecture
from weightwire.transfer.topology_plan import Side, TopologyPlan, describe_model, plan_topologies, trace_rank


def described(folder: Path, members: Mapping[str, object]) -> ModelIdentity:
    """A model whose folder holds nothing but its configuration."""
    (folder / "config.json").write_text(json.dumps(dict(members)))
    return describe_model(folder)


def side(tp: int = 1, pp: int = 1, ep: int = 1, **options: object) -> Side:
    return Side(topology=Topology(tp=tp, pp=pp, ep=ep), options=BuildOptions(**options))  # type: ignore[arg-type]


def planned(identity: ModelIdentity, source: Side, target: Side) -> TopologyPlan:
    return plan_topologies(identity, source, target, range(target.topology.world_size))


def shell_bytes(identity: ModelIdentity, target: Side, rank: int) -> int:
    return trace_rank(identity, target, rank).manifest.total_bytes


# -- what a model is --


def test_config_alone_describes_the_checkpoint_that_belongs_to_it(tmp_path: Path) -> None:
    full = write_checkpoint(tmp_path / "full", decoder(num_experts=4), EXPERTS)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((full / "config.json").read_bytes())
    known, told = describe_model(full), describe_model(tmp_path / "bare")
    assert sorted(told.checkpoint, key=str) == sorted(known.checkpoint, key=str)
    assert (told.revision, told.config) == ("", known.config)
    with Checkpoint.open(full) as checkpoint:
        assert known.revision == checkpoint.revision


def test_config_file_itself_is_a_description_whatever_lies_beside_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"other": decoder()["lm_head.weight"]}, DECODER)
    found = describe_model(tmp_path / "config.json")
    assert {spec.name for spec in found.checkpoint} == set(decoder())


def test_headers_win_over_what_the_config_says(tmp_path: Path) -> None:
    content = decoder()
    del content["model.norm.weight"]
    found = describe_model(write_checkpoint(tmp_path, content, DECODER))
    assert {spec.name for spec in found.checkpoint} == set(content)


def test_folder_with_pickles_is_described_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert {spec.name for spec in described(tmp_path, DECODER).checkpoint} == set(decoder())


@pytest.mark.parametrize("name", ["", "absent", "empty"])
def test_model_without_a_config_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        describe_model(tmp_path / name)


def test_config_of_an_unknown_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'TopsyForCausalLM'"):
        described(tmp_path, {**DECODER, "architectures": ["TopsyForCausalLM"]})


def test_broken_checkpoint_is_not_passed_over_for_the_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError):
        described(tmp_path, DECODER)


# -- plans --

PAIRS = [
    pytest.param(side(tp=2), side(tp=2), id="the same"),
    pytest.param(side(tp=2), side(tp=1, pp=2), id="ranks to stages"),
    pytest.param(side(tp=2, ep=2), side(tp=1), id="groups of experts to one"),
    pytest.param(side(), side(tp=4, ep=4), id="one to groups of experts"),
    pytest.param(side(tp=4, ep=4), side(tp=2, pp=2, ep=2), id="everything at once"),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_byte_of_the_target_has_a_source(tmp_path: Path, source: Side, target: Side, tied: bool) -> None:
    identity = described(tmp_path, {**EXPERTS, "tie_word_embeddings": tied})
    found = planned(identity, source, target)
    assert found.ways["disk"] == 0
    assert sum(found.source_bytes) == found.nbytes
    padding = found.ways["constant"]
    for rank in found.ranks:
        assert (sum(rank.source_bytes), rank.uncovered, rank.opaque) == (rank.nbytes, {}, {})
        if not padding and not tied:
            assert rank.nbytes <= shell_bytes(identity, target, rank.rank)
    assert len(found.source_bytes) == source.topology.world_size
    if source == target:
        assert set(found.ways) == {"identical"}


def test_only_the_ranks_that_are_asked_for_are_planned(tmp_path: Path) -> None:
    identity = described(tmp_path, DECODER)
    seen: list[tuple[str, int]] = []
    found = plan_topologies(
        identity, side(tp=2), side(tp=2, pp=2), [3], on_rank=lambda role, rank: seen.append((role, rank))
    )
    assert [rank.rank for rank in found.ranks] == [3]
    assert seen == [("source", 0), ("source", 1), ("target", 3)]
    assert found.seconds_trace_source > 0
    assert found.ranks[0].seconds_trace > 0
    whole = planned(identity, side(tp=2), side(tp=2, pp=2))
    assert whole.ranks[3].ways == found.ranks[0].ways
    assert whole.copies == sum(rank.copies for rank in whole.ranks)


def test_no_rank_at_all_takes_nothing(tmp_path: Path) -> None:
    found = plan_topologies(described(tmp_path, DECODER), side(tp=2), side(), [])
    assert (found.nbytes, found.copies, found.ranks, found.ways) == (0, 0, (), {})
    assert found.source_bytes == (0, 0)


def test_sides_are_laid_out_by_their_own_options(tmp_path: Path) -> None:
    identity = described(tmp_path, EXPERTS)
    mapped = side(tp=2, ep=2, expert_map=((0, 1), (3, 2, 3)), vocab_multiple=32)
    for source, target in ((mapped, side(tp=2)), (side(tp=2), mapped)):
        found = planned(identity, source, target)
        assert (found.ways["disk"], sum(found.source_bytes)) == (0, found.nbytes)
    # The expert that lies there twice comes twice.
    rows = {way.name: way.nbytes for way in planned(identity, side(), mapped).ranks[1].ways}
    assert rows["model.layers.0.mlp.experts.w2_weight"] == 3 * 16 * 6 * 2


def test_options_name_no_device(tmp_path: Path) -> None:
    identity = described(tmp_path, {**DECODER, "vocab_size": 1 << 30})
    found = plan_topologies(identity, side(tp=4, device="cpu"), side(tp=2, device="cpu"), [0])
    assert found.nbytes > 1 << 34


def test_padded_heads_come_from_nowhere(tmp_path: Path) -> None:
    identity = described(tmp_path, {**DECODER, "num_key_value_heads": 4, "num_attention_heads": 4})
    found = planned(identity, side(tp=3, pad_heads=True), side(tp=2))
    assert (found.ways["disk"], sum(found.source_bytes)) == (0, found.nbytes)


def test_what_cannot_be_traced_is_told_for_both_sides(tmp_path: Path) -> None:
    identity = described(tmp_path, DECODER)
    odd = ModelIdentity(
        model="m", config=str(identity.config).replace("Llama", "Odd"), checkpoint=identity.checkpoint
    )  # fmt: skip
    found = planned(odd, side(tp=2), side())
    computed, half = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    assert [set(rank) for rank in found.source_opaque] == [{computed}, {computed}]
    (rank,) = found.ranks
    assert set(rank.opaque) == {computed}
    # Nobody knows what belongs into the first, and nothing belongs into one half of the second.
    assert rank.uncovered == {computed: 16, half: 8}
    assert {way.name for way in rank.ways if way.way == "disk"} == {computed}


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        pytest.param(side(tp=3), side(), "source: LlamaForCausalLM, rank 0, .*2 key-value heads", id="source"),
        pytest.param(side(), side(pp=3), "target: LlamaForCausalLM, rank 0, layers: pp=3", id="target"),
    ],
)
def test_impossible_topology_names_its_side(tmp_path: Path, source: Side, target: Side, message: str) -> None:
    with pytest.raises(TopologyError, match=message) as raised:
        planned(described(tmp_path, DECODER), source, target)
    assert raised.value.facts["rank"] == 0


def test_names_without_a_place_are_refused_or_passed_over(tmp_path: Path) -> None:
    identity = described(tmp_path, DECODER)
    extra = CheckpointSpec(name="model.layers.0.odd.weight", dtype="bfloat16", shape=(4,))
    identity = ModelIdentity(model="m", config=identity.config, checkpoint=(*identity.checkpoint, extra))
    with pytest.raises(NamesError):
        trace_rank(identity, side(), 0)
    warned = Side(topology=Topology(), unexpected="warn")
    assert trace_rank(identity, warned, 0).uncovered == {}


class _Computed(WholeLoader):
    """Takes its tensor through arithmetic, of which a trace sees the result and not the rule."""

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        return super().load(shell, tensor * 2, slot, name=name)


class _Half(WholeLoader):
    """Writes the first half of its shell and says that it is all."""

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        half = shell.shape[0] // 2
        return super().load(shell[:half], tensor[:half], slot, name=name)


@registers_architecture("OddForCausalLM")
class OddForCausalLM(LlamaForCausalLM):
    """A Llama whose norms have loaders of their own."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        attach_loader(self.get_parameter("model.norm.weight"), _Computed())
        attach_loader(self.get_parameter("model.layers.0.input_layernorm.weight"), _Half())
