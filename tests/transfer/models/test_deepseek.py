"""What DeepSeek's checkpoints have and others have not: a draft layer, shared experts, an indexer, blocks of FP8."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.transfer.models.closed_form import expected_shells
from tests.transfer.models.conftest import Saved, differences, poisoned, ranks, same_bytes, write_folder
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.errors import ConfigError, NamesError, SlotsError, TopologyError
from weightwire.transfer.loading.block_scales import num_blocks
from weightwire.transfer.loading.direct import load_direct
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import (
    BuildOptions,
    DeepseekV3ForCausalLMNextN,
    ParameterTree,
    build_model,
    parse_config,
)
from weightwire.transfer.models.expected_specs import expected_specs
from weightwire.transfer.tracing import trace_placement

SavedBy = Callable[[str], Saved]
Tensors = Mapping[str, torch.Tensor]
BOTH_WAYS = pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
DRAFT = BuildOptions(role="draft")
FUSED = BuildOptions(fuse_shared_expert=True)
LAYER = "model.layers.1"
BLOCK = (2, 2)
_IN_FP8 = re.compile(r"\.(q_a|q_b|kv_b|o|gate|up|down)_proj\.weight$|kv_a_proj_with_mqa\.weight$|\.(wq_b|wk)\.weight$")


def with_draft(saved: Saved) -> Saved:
    """The same with a draft layer behind the last one, which transformers has no class for."""
    torch.manual_seed(5)
    last = saved.config.num_layers
    prefix, hidden = f"model.layers.{last}.", saved.config.hidden_size
    tensors = dict(saved.tensors)
    for name, tensor in saved.tensors.items():
        if name.startswith(f"model.layers.{last - 1}."):
            tensors[prefix + name.split(".", 3)[3]] = torch.randn(tensor.shape).to(tensor.dtype)
    own = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,)}
    tensors |= {f"{prefix}{part}.weight": torch.randn(shape).bfloat16() for part, shape in own.items()}
    for part, of in (("shared_head.head", "lm_head"), ("embed_tokens", "model.embed_tokens")):
        tensors[f"{prefix}{part}.weight"] = saved.tensors[f"{of}.weight"].clone()
    config = parse_config({**saved.members, "num_nextn_predict_layers": 1})
    return replace(saved, tensors=tensors, config=config)


def in_fp8(saved: Saved) -> Saved:
    """The same with each linear layer as FP8 in blocks, by the definition of the format."""
    tensors = dict[str, torch.Tensor]()
    for name, tensor in saved.tensors.items():
        if not _IN_FP8.search(name):
            tensors[name] = tensor
            continue
        scales = torch.empty(num_blocks(tensor.shape[0], tensor.shape[1], BLOCK))
        values = torch.empty(tensor.shape)
        for row in range(scales.shape[0]):
            for col in range(scales.shape[1]):
                rows, cols = (slice(BLOCK[axis] * at, BLOCK[axis] * (at + 1)) for axis, at in enumerate((row, col)))
                scales[row, col] = tensor[rows, cols].float().abs().max() / 448
                values[rows, cols] = tensor[rows, cols].float() / scales[row, col]
        tensors[name] = values.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    quantisation = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
    config = parse_config({**saved.members, "quantization_config": quantisation})
    return replace(saved, tensors=tensors, config=config)


def loaded(
    saved: Saved, topology: Topology, rank: int, *, options: BuildOptions | None = None, central: bool = False
) -> ParameterTree:
    tree = poisoned(saved.config, topology, rank, options)
    report = tree.load_weights(saved.tensors.items(), central=central)
    assert sum(report.counts.values()) == len(saved.tensors)
    return tree


# -- the draft layer --


# L122
@BOTH_WAYS
def test_main_role_leaves_the_draft_layer_alone(saved: SavedBy, central: bool) -> None:
    checkpoint = saved("deepseek_v3")
    without = loaded(checkpoint, Topology(), 0)
    assert differences(without, loaded(with_draft(checkpoint), Topology(), 0, central=central)) == []


# L123, L124
@BOTH_WAYS
@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2, ep=2)], ids=str)
def test_draft_role_holds_the_draft_layer_alone(saved: SavedBy, topology: Topology, central: bool) -> None:
    checkpoint = with_draft(saved("deepseek_v3"))
    # As the last layer of a model with one layer more, for the formula.
    last = checkpoint.config.num_layers
    as_layer = replace(checkpoint, config=replace(checkpoint.config, num_layers=last + 1))
    for rank in ranks(topology):
        draft = loaded(checkpoint, topology, rank, options=DRAFT, central=central)
        formula = expected_shells(as_layer, topology, rank, vocab_multiple=64 * topology.tp)
        prefix = f"model.layers.{last}."
        expected = {f"model.decoder.{n.removeprefix(prefix)}": t for n, t in formula.items() if n.startswith(prefix)}
        for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
            expected[f"model.{part}.weight"] = expected.pop(f"model.decoder.{part}.weight")
        for part in ("shared_head.head", "embed_tokens"):
            del expected[f"model.decoder.{part}.weight"]
        shells = draft.state_dict()
        assert shells.keys() == expected.keys()
        assert [name for name in expected if not same_bytes(shells[name], expected[name])] == []


# L122, L123, L124
def test_roles_split_a_checkpoint_exactly_once_between_them(saved: SavedBy) -> None:
    checkpoint = with_draft(saved("deepseek_v3"))
    placed = Counter[str]()
    for options in (BuildOptions(), DRAFT):
        tree = build_model(checkpoint.config, options=options)
        report = tree.load_weights(checkpoint.tensors.items())
        placed.update(outcome.name for outcome in report.outcomes if outcome.outcome is Outcome.PLACED)
    borrowed = {f"model.layers.3.{part}.weight" for part in ("shared_head.head", "embed_tokens")}
    assert placed == Counter(checkpoint.tensors.keys() - borrowed)


# L124
def test_draft_has_the_very_embedding_and_head_of_its_target(saved: SavedBy) -> None:
    checkpoint = with_draft(saved("deepseek_v3"))
    target, draft = loaded(checkpoint, Topology(), 0), loaded(checkpoint, Topology(), 0, options=DRAFT)
    assert isinstance(draft, DeepseekV3ForCausalLMNextN)
    before = shells_of(draft).keys()
    draft.share_with(target)
    assert draft.model.embed_tokens.weight is target.get_parameter("model.embed_tokens.weight")
    assert draft.lm_head.weight is target.get_parameter("lm_head.weight")
    # It owns no memory for them, and loading it again asks for none of them.
    assert shells_of(draft).keys() == before
    draft.load_weights(checkpoint.tensors.items())


# L87
def test_draft_that_cannot_be_is_refused_when_it_is_built(saved: SavedBy) -> None:
    checkpoint = with_draft(saved("deepseek_v3"))
    with pytest.raises(TopologyError, match="pp=2, expected 1"):
        build_model(checkpoint.config, Topology(pp=2), 0, DRAFT)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        build_model(replace(checkpoint.config, num_draft_layers=0), options=DRAFT)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        build_model(saved("llama").config, options=DRAFT)
    draft = build_model(checkpoint.config, options=DRAFT)
    assert isinstance(draft, DeepseekV3ForCausalLMNextN)
    with pytest.raises(ConfigError, match="embedding and head"):
        draft.share_with(build_model(checkpoint.config, Topology(pp=2), 0))


# L122, L123
@BOTH_WAYS
@pytest.mark.parametrize("options", [BuildOptions(), DRAFT], ids=["main role", "draft role"])
@pytest.mark.parametrize("spelling", ["language_model.", "language.", "model.language_model.-", "-"])
def test_every_spelling_of_the_prefix_leads_to_the_same_shells(
    saved: SavedBy, *, options: BuildOptions, spelling: str, central: bool
) -> None:
    checkpoint = with_draft(saved("deepseek_v3"))

    def spelled(name: str) -> str:
        if name.startswith("lm_head."):
            return spelling.removeprefix("model.").rstrip("-") + name
        return spelling.rstrip("-") + (name.removeprefix("model.") if spelling.endswith("-") else name)

    others = replace(checkpoint, tensors={spelled(name): tensor for name, tensor in checkpoint.tensors.items()})
    expected = loaded(checkpoint, Topology(), 0, options=options)
    assert differences(expected, loaded(others, Topology(), 0, options=options, central=central)) == []


# L51, L123
@BOTH_WAYS
@pytest.mark.parametrize("options", [BuildOptions(), DRAFT], ids=["main role", "draft role"])
def test_draft_layer_may_stand_under_a_prefix_of_its_own(saved: SavedBy, options: BuildOptions, central: bool) -> None:
    checkpoint = with_draft(saved("deepseek_v3"))
    others = {name.replace("model.layers.3.", "model.mtp.layers.0."): t for name, t in checkpoint.tensors.items()}
    expected = loaded(checkpoint, Topology(), 0, options=options)
    found = loaded(replace(checkpoint, tensors=others), Topology(), 0, options=options, central=central)
    assert differences(expected, found) == []


# -- both ways --

ODD = {
    "model.layers.1.mlp.experts.3.up_proj.input_scale": torch.ones(()),
    "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(2),
    "model.layers.0.self_attn.indexer.wk.weight": torch.ones(2, 2),
    "model.layers.1.self_attn.k_proj.k_scale": torch.ones(()),
    "model.layers.2.self_attn.attn_mqa.v_scale": torch.ones(()),
    "model.layers.2.mlp.experts.0.down_proj.bias": torch.zeros(8),
    "model.layers.1.mlp.shared_experts.up_proj.bias": torch.zeros(8),
    "model.layers.3.mlp.experts.1.up_proj.input_scale": torch.ones(()),
    "model.layers.9.mlp.gate.weight": torch.ones(4, 8),
}


# L79, L119, C3
@pytest.mark.parametrize(
    "options",
    [BuildOptions(), DRAFT, BuildOptions(kv_scales=True), BuildOptions(separate_head=True)],
    ids=["main role", "draft role", "with scales of the cache", "with a head of its own"],
)
@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2, ep=2), Topology(pp=2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_both_ways_decide_alike(saved: SavedBy, *, options: BuildOptions, topology: Topology, tied: bool) -> None:
    checkpoint = with_draft(saved("deepseek_v3"))
    config = replace(checkpoint.config, tie_word_embeddings=tied)
    tensors = {**checkpoint.tensors, **ODD}
    for rank in ranks(topology) if options != DRAFT or topology.pp == 1 else ():
        trees = [poisoned(config, topology, rank, options) for _ in range(2)]
        by_tables, by_walk = (
            tree.load_weights(tensors.items(), central=central)
            for tree, central in zip(trees, (False, True), strict=True)
        )
        assert differences(*trees) == []
        assert by_tables.counts == by_walk.counts
        ended = [
            {o.name: (o.outcome, o.target, o.slot) for o in one.outcomes if o.is_read} for one in (by_tables, by_walk)
        ]
        assert ended[0] == ended[1]


# L70, L79
@BOTH_WAYS
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_c_proj.weight", "model.layers.1.mlp.experts.4.up_proj.weight", "foo"]
)
def test_both_ways_refuse_what_nobody_knows(saved: SavedBy, name: str, central: bool) -> None:
    checkpoint = saved("deepseek_v3")
    tree = poisoned(checkpoint.config)
    with pytest.raises(NamesError) as caught:
        tree.load_weights({**checkpoint.tensors, name: torch.ones(4, 8)}.items(), central=central)
    assert caught.value.facts["unexpected"] == [name]


# -- shared experts --


# L120, L121
@BOTH_WAYS
@pytest.mark.parametrize("fused_in_file", [False, True], ids=["experts apart", "experts in one tensor"])
@pytest.mark.parametrize("shared_first", [False, True], ids=["shared last", "shared first"])
def test_b27_shared_expert_lies_behind_the_routed_ones_of_every_rank(
    saved: SavedBy, *, fused_in_file: bool, shared_first: bool, central: bool
) -> None:
    checkpoint, topology = saved("deepseek_v32"), Topology(tp=4, ep=2)
    if fused_in_file:
        checkpoint = checkpoint.fused()
    in_order = sorted(checkpoint.tensors, key=lambda name: (".shared_experts." in name) != shared_first)
    checkpoint = replace(checkpoint, tensors={name: checkpoint.tensors[name] for name in in_order})
    apart = saved("deepseek_v32")
    for rank in ranks(topology):
        tree = loaded(checkpoint, topology, rank, options=FUSED, central=central)
        routed = expected_shells(apart, topology, rank, vocab_multiple=64 * topology.tp)
        shared = {
            part: apart.tensors[f"{LAYER}.mlp.shared_experts.{part}_proj.weight"].chunk(2, dim=int(part == "down"))[
                rank % 2
            ]
            for part in ("gate", "up", "down")
        }
        w13, w2 = (tree.get_parameter(f"{LAYER}.mlp.experts.{name}_weight") for name in ("w13", "w2"))
        assert w13[:2].equal(routed[f"{LAYER}.mlp.experts.w13_weight"])
        assert w13[2].equal(torch.cat([shared["gate"], shared["up"]]))
        assert w2[:2].equal(routed[f"{LAYER}.mlp.experts.w2_weight"])
        assert w2[2].equal(shared["down"])
        assert not [name for name in shells_of(tree) if "shared_experts" in name]


# L64, L121
def test_shared_expert_lies_behind_replicas(saved: SavedBy) -> None:
    checkpoint = saved("deepseek_v32")
    options = replace(FUSED, expert_map=((0, 1, 2), (3, 0, 1)))
    for rank in range(2):
        tree = loaded(checkpoint, Topology(tp=2, ep=2), rank, options=options)
        down = tree.get_parameter(f"{LAYER}.mlp.experts.w2_weight")
        expected = [f"experts.{number}" for number in options.expert_map[rank]] if options.expert_map else []
        for index, expert in enumerate([*expected, "shared_experts"]):
            assert down[index].equal(checkpoint.tensors[f"{LAYER}.mlp.{expert}.down_proj.weight"])


# L87, L120
def test_several_shared_experts_cannot_pose_as_one_routed(saved: SavedBy) -> None:
    with pytest.raises(ConfigError, match="'n_shared_experts' is 2, expected 1"):
        build_model(saved("deepseek_v3").config, options=FUSED)


# L05, L120
def test_shared_expert_that_is_missing_is_named(saved: SavedBy) -> None:
    checkpoint = saved("deepseek_v32")
    tensors = {name: t for name, t in checkpoint.tensors.items() if ".shared_experts.up_proj" not in name}
    with pytest.raises(SlotsError) as caught:
        loaded(replace(checkpoint, tensors=tensors), Topology(), 0, options=FUSED)
    assert f"{LAYER}.mlp.experts.w13_weight[4.w3]" in str(caught.value)


# -- FP8 and the indexer --


def dequantised(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    found = torch.empty(weight.shape)
    for row in range(weight.shape[0]):
        for col in range(weight.shape[1]):
            found[row, col] = weight[row, col].float() * scales[row // BLOCK[0], col // BLOCK[1]]
    return found.bfloat16()


# L105, L127, L128
@BOTH_WAYS
@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2), Topology(tp=2, ep=2, pp=2)], ids=str)
def test_fp8_comes_with_its_scales_and_the_indexer_without(saved: SavedBy, topology: Topology, central: bool) -> None:
    plain = saved("deepseek_v32")
    checkpoint = in_fp8(plain)
    halves = {n: t for n, t in checkpoint.tensors.items() if not n.endswith("_scale_inv")}
    scales = {n.removesuffix("_scale_inv"): t for n, t in checkpoint.tensors.items() if n.endswith("_scale_inv")}
    for name in [name for name in scales if ".wk." in name]:
        halves[name] = dequantised(halves[name], scales.pop(name))
    # A scale goes where the rows and columns of its block go.
    wide = {n: scales.get(n, t) for n, t in halves.items()}
    for rank in ranks(topology):
        shells = loaded(checkpoint, topology, rank, central=central).state_dict()
        values = expected_shells(replace(plain, tensors=halves), topology, rank, vocab_multiple=64 * topology.tp)
        of_blocks = expected_shells(replace(plain, tensors=wide), topology, rank, vocab_multiple=64 * topology.tp)
        expected = values | {
            f"{name}_scale_inv": tensor
            for name, tensor in of_blocks.items()
            if values[name].dtype == torch.float8_e4m3fn
        }
        assert shells.keys() == expected.keys()
        assert [name for name in expected if not same_bytes(shells[name], expected[name])] == []


# L191
@pytest.mark.parametrize("kind", ["bfloat16", "FP8"])
def test_indexer_of_fp8_is_all_that_no_trace_shows(saved: SavedBy, tmp_path: Path, kind: str) -> None:
    checkpoint = saved("deepseek_v32") if kind == "bfloat16" else in_fp8(saved("deepseek_v32"))
    folder = write_folder(tmp_path, dict(checkpoint.config.source), checkpoint.tensors)
    tree = build_model(checkpoint.config, options=BuildOptions(device="meta"))
    with Checkpoint.open(folder) as opened:
        trace = trace_placement(tree.load_weights, shells_of(tree), specs_of(opened))
    opaque = {f"model.layers.{n}.self_attn.indexer.wk_weights_proj.weight" for n in range(3)}
    assert set(trace.opaque) == (opaque if kind == "FP8" else set())
    assert {name for name in trace.ordinary if ".indexer." not in name} == set()


# L128
@BOTH_WAYS
def test_direct_load_of_fp8_is_the_load_of_a_stream(saved: SavedBy, tmp_path: Path, central: bool) -> None:
    checkpoint, topology = in_fp8(saved("deepseek_v32")), Topology(tp=2, ep=2)
    folder = write_folder(tmp_path, dict(checkpoint.config.source), checkpoint.tensors)
    for rank in ranks(topology):
        tree = poisoned(checkpoint.config, topology, rank)
        with Checkpoint.open(folder) as opened:
            load_direct(tree, opened, control=Control(deadline_s=60), central=central)
        assert differences(tree, loaded(checkpoint, topology, rank)) == []


# L105
def test_border_of_a_head_inside_a_block_is_refused(saved: SavedBy) -> None:
    with pytest.raises(TopologyError, match=r"kv_b_proj.*lies inside a block"):
        build_model(in_fp8(saved("deepseek_v32")).config, Topology(tp=4), 1)


# L129, D13
@BOTH_WAYS
def test_weight_of_an_indexer_without_its_scale_is_named(saved: SavedBy, central: bool) -> None:
    checkpoint = in_fp8(saved("deepseek_v32"))
    missing = f"{LAYER}.self_attn.indexer.wk.weight_scale_inv"
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != missing}
    with pytest.raises(SlotsError, match=re.escape(missing)) as caught:
        loaded(replace(checkpoint, tensors=tensors), Topology(), 0, central=central)
    assert caught.value.facts["diagnostic"] == "D13"


def test_expected_specs_know_fp8_of_an_indexer(saved: SavedBy) -> None:
    checkpoint = in_fp8(saved("deepseek_v32"))
    written = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in checkpoint.tensors.items()}
    found = {spec.name: (spec.dtype, spec.shape) for spec in expected_specs(checkpoint.config)}
    assert found.keys() == written.keys()
    assert {name for name in found if found[name] != written[name]} == {
        name for name in written if name.endswith(("e_score_correction_bias", "k_norm.weight", "k_norm.bias"))
    }


# L94
def test_b53_bias_of_a_router_keeps_every_bit_of_float32(saved: SavedBy) -> None:
    name = f"{LAYER}.mlp.gate.e_score_correction_bias"
    checkpoint = saved("deepseek_v3")
    exact = torch.tensor([0.1001, 0.1002, 0.1003, 0.1004])
    tree = loaded(replace(checkpoint, tensors={**checkpoint.tensors, name: exact}), Topology(), 0)
    assert same_bytes(tree.get_parameter(name), exact)


@pytest.mark.parametrize(
    ("method", "expected"), [("noaux_tc", True), (None, True), ("greedy", False)], ids=lambda value: str(value)
)
def test_router_is_corrected_as_the_file_says(saved: SavedBy, method: str | None, expected: bool) -> None:
    members = {**saved("deepseek_v3").members, "topk_method": method}
    names = shells_of(build_model(parse_config(members), options=BuildOptions(device="meta")))
    assert (f"{LAYER}.mlp.gate.e_score_correction_bias" in names) == expected


# L60, L122
def test_parameters_of_the_full_size_are_the_published_count() -> None:
    members = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    tree = build_model(parse_config(members), options=BuildOptions(device="meta"))
    assert sum(shell.numel() for shell in shells_of(tree).values()) == 671_026_419_200


def test_dense_layers_are_the_first_ones_and_those_between(saved: SavedBy) -> None:
    members = {**saved("deepseek_v3").members, "num_hidden_layers": 7, "first_k_dense_replace": 2, "moe_layer_freq": 2}
    config = parse_config(members)
    assert [layer for layer in range(7) if config.has_experts(layer)] == [2, 4, 6]
