"""Building: what is refused and how the message reads, where shells lie, and which of them there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.transfer.models.conftest import poisoned
from weightwire.transfer.admission import available_bytes
from weightwire.transfer.errors import AdmissionError, ConfigError, NamesError, TopologyError
from weightwire.transfer.loading.slots import attached_loader
from weightwire.transfer.loading.walker import Pair
from weightwire.transfer.manifest import CheckpointSpec, Topology
from weightwire.transfer.models import (
    Blueprint,
    BuildOptions,
    LlamaForCausalLM,
    ModelConfig,
    architectures,
    build_model,
    build_plain,
    materialise,
    parse_config,
    plan_memory,
    registers_architecture,
)
from weightwire.transfer.ranks import RankPlace

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "dtype": "bfloat16",
}
MOE: dict[str, object] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "moe_intermediate_size": 6,
}
META = BuildOptions(device="meta")


def config(**changes: object) -> ModelConfig:
    return parse_config(LLAMA | changes)


# L84
def test_shells_are_built_where_they_stay_in_the_dtype_of_the_model() -> None:
    model = build_model(config(), options=META)
    assert {(shell.device.type, shell.dtype) for shell in model.parameters()} == {("meta", torch.bfloat16)}
    assert torch.empty(1).device.type == "cpu"
    half = build_model(config(), options=BuildOptions(dtype=torch.float16))
    assert {(shell.device.type, shell.dtype) for shell in half.parameters()} == {("cpu", torch.float16)}


# L84
def test_defaults_are_back_after_a_tree_that_cannot_be_built() -> None:
    with pytest.raises(TopologyError):
        build_model(config(intermediate_size=15), Topology(tp=2), options=META)
    assert torch.empty(1).device.type == "cpu"
    assert torch.get_default_dtype() == torch.float32


# L84
def test_shells_need_no_gradient_and_have_a_loader_each() -> None:
    model = build_model(parse_config(MOE), Topology(tp=2), options=META)
    assert [name for name, shell in model.named_parameters() if shell.requires_grad] == []
    assert [name for name, shell in model.named_parameters() if attached_loader(shell) is None] == []


# L85
def test_memory_of_the_shells_is_known_before_they_are_built() -> None:
    for topology in (Topology(), Topology(tp=2, pp=2)):
        planned = plan_memory(parse_config(MOE), topology, 0)
        model = build_model(parse_config(MOE), topology, 0)
        assert planned.shells_bytes == sum(shell.numel() * shell.element_size() for shell in model.parameters())


# L85
def test_shells_that_do_not_fit_into_memory_are_refused_before_they_are_built() -> None:
    huge = config(hidden_size=1 << 20, vocab_size=1 << 30)
    assert available_bytes() is not None
    with pytest.raises(AdmissionError, match="the shells of LlamaForCausalLM, rank 0"):
        build_model(huge)
    assert plan_memory(huge).shells_bytes > 1 << 50


class Interrupted(LlamaForCausalLM):
    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        if not self.model.norm.weight.is_meta:
            raise torch.OutOfMemoryError("out of memory")


# L85
def test_memory_that_runs_out_in_construction_is_said_to_be_the_phase_of_shells() -> None:
    if "InterruptedForCausalLM" not in architectures():
        registers_architecture("InterruptedForCausalLM")(Interrupted)
    with pytest.raises(AdmissionError) as caught:
        build_model(config(architectures=["InterruptedForCausalLM"]))
    assert caught.value.facts["phase"] == "shells"
    assert caught.value.facts["needed_bytes"] == plan_memory(config()).shells_bytes


class Miswired(LlamaForCausalLM):
    """The last stage forgets its norm, the first one a layer."""

    def seal(self, tables: object) -> None:
        if self.place.pipeline.rank == 0:
            del self.model.layers["0"]
        else:
            del self.model.norm
        super().seal(tables)  # type: ignore[arg-type]


# L87
@pytest.mark.parametrize(("rank", "what"), [(0, r"has layers \[\], expected \[0\]"), (1, r"model\.norm: is absent")])
def test_stage_that_is_wired_wrongly_is_found_before_anything_is_read(rank: int, what: str) -> None:
    opened = list[str]()

    def pairs() -> Iterator[Pair]:
        opened.append("a file")
        yield "model.norm.weight", torch.zeros(8)

    def load() -> None:
        place = RankPlace.of(Topology(pp=2), rank)
        with torch.device("meta"):
            model = Miswired(Blueprint(config=config(), place=place, options=META))
        model.load_weights(pairs())

    with pytest.raises(TopologyError, match=what) as caught:
        load()
    assert (caught.value.facts["model"], caught.value.facts["rank"]) == ("Miswired", rank)
    assert opened == []


# L87
@pytest.mark.parametrize(
    ("members", "field"),
    [
        pytest.param(LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "architectures", id="nobody knows it"),
        pytest.param(MOE | {"architectures": ["LlamaForCausalLM"]}, "num_experts", id="it has no experts"),
    ],
)
def test_architecture_that_cannot_be_built_is_refused(members: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(parse_config(members), options=META)
    assert caught.value.facts["field"] == field


# L87, L101
@pytest.mark.parametrize(
    ("members", "topology", "rank", "numbers"),
    [
        pytest.param(
            LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 2},
            Topology(tp=4),
            3,
            ("4", "3"),
            id="kv heads over ranks",
        ),
        pytest.param(LLAMA, Topology(tp=8), 0, ("8", "4"), id="heads over ranks"),
        pytest.param(LLAMA | {"intermediate_size": 18}, Topology(tp=4), 1, ("18", "4"), id="intermediate over ranks"),
        pytest.param(LLAMA, Topology(pp=3), 2, ("3", "2"), id="layers over stages"),
        pytest.param(MOE | {"num_experts": 3}, Topology(tp=2, ep=2), 1, ("3", "2"), id="experts over ranks"),
        pytest.param(MOE, Topology(tp=4), 2, ("6", "4"), id="expert intermediate over ranks"),
    ],
)
def test_topology_that_the_model_cannot_have_names_model_rank_and_numbers(
    members: dict[str, object], topology: Topology, rank: int, numbers: tuple[str, str]
) -> None:
    parsed = parse_config(members)
    with pytest.raises(TopologyError) as caught:
        build_model(parsed, topology, rank, META)
    message = str(caught.value)
    assert message.startswith(f"{parsed.architecture}, rank {rank}, ")
    assert all(number in message.split(f"rank {rank}", 1)[1] for number in numbers)
    assert caught.value.facts["model"] == parsed.architecture


def test_vocabulary_that_the_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"33.*2"):
        build_model(config(vocab_size=33), Topology(tp=2), 1, BuildOptions(device="meta", vocab_multiple=1))


@pytest.mark.parametrize(("pp", "rank"), [(2, 2), (1, -1)])
def test_rank_outside_of_the_topology_is_refused(pp: int, rank: int) -> None:
    with pytest.raises(TopologyError, match=f"rank {rank}"):
        build_model(config(), Topology(pp=pp), rank, META)


def test_expert_map_for_other_ranks_is_refused() -> None:
    with pytest.raises(TopologyError, match="expert map: made for 1 ranks, expected ep=2"):
        build_model(parse_config(MOE), Topology(tp=2, ep=2), 0, BuildOptions(device="meta", expert_map=[[0, 1, 2, 3]]))


# L117
def test_heads_that_do_not_divide_are_padded_if_asked_for() -> None:
    """6 heads on 4 ranks: two each, and the last rank has none that is real."""
    parsed = parse_config(LLAMA | {"num_attention_heads": 6, "head_dim": 2})
    tensors = {
        f"model.layers.{layer}.self_attn.{part}_proj.weight": torch.randn(shape).bfloat16()
        for layer in range(2)
        for part, shape in {"q": (12, 8), "k": (12, 8), "v": (12, 8), "o": (8, 12)}.items()
    }
    model = poisoned(parsed, Topology(tp=4), 3, BuildOptions(pad_heads=True))
    qkv = model.get_parameter("model.layers.0.self_attn.qkv_proj.weight")
    output = model.get_parameter("model.layers.0.self_attn.o_proj.weight")
    assert (qkv.shape, output.shape) == ((12, 8), (8, 4))
    with pytest.raises(Exception, match="slots"):
        model.load_weights(tensors.items())
    assert not qkv.any()
    assert not output.any()


# L88
def test_block_scales_have_one_element_for_each_block() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    parsed = config(hidden_size=256, intermediate_size=256, quantization_config=fp8)
    model = build_model(parsed, options=META)
    output = model.get_submodule("model.layers.0.self_attn.o_proj")
    assert output.get_parameter("weight").shape == (256, 256)
    assert output.get_parameter("weight").dtype == torch.float8_e4m3fn
    scale = output.get_parameter("weight_scale")
    assert (scale.shape, scale.dtype) == ((2, 2), torch.float32)
    assert model.get_parameter("model.embed_tokens.weight").dtype == torch.bfloat16
    assert not [name for name, _ in model.named_parameters() if "norm" in name and "scale" in name]


# L88
def test_experts_have_scales_of_their_own_for_each_format() -> None:
    for extra, shapes in (
        ({"weight_block_size": [2, 3]}, {"w13_weight_scale_inv": (4, 6, 3), "w2_weight_scale_inv": (4, 4, 2)}),
        ({}, {"w13_weight_scale": (4, 2), "w2_weight_scale": (4,)}),
        ({"activation_scheme": "static"}, {"w13_input_scale": (4,), "w2_input_scale": (4,)}),
    ):
        members = MOE | {"quantization_config": {"quant_method": "fp8", **extra}}
        experts = build_model(parse_config(members), options=META).get_submodule("model.layers.0.mlp.experts")
        assert {name: tuple(experts.get_parameter(name).shape) for name in shapes} == shapes
        assert experts.get_parameter("w13_weight").dtype == torch.float8_e4m3fn


# L88, L105
def test_block_that_a_rank_would_cut_is_refused() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    with pytest.raises(TopologyError, match=r"LlamaForCausalLM, rank 1, model\.layers\.0\.self_attn\.qkv_proj.*16"):
        build_model(config(hidden_size=16, quantization_config=fp8), Topology(tp=2), 1, META)


# L88
def test_modules_that_the_format_leaves_out_have_no_scales() -> None:
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1", "o_proj"]}
    model = build_model(config(quantization_config=fp8), options=META)
    scaled = {name.rpartition(".")[0] for name, _ in model.named_parameters() if name.endswith("_scale")}
    prefix = "model.layers.0"
    assert scaled == {f"{prefix}.self_attn.qkv_proj", f"{prefix}.mlp.gate_up_proj", f"{prefix}.mlp.down_proj"}


# L89
def test_tied_tree_stays_tied_from_meta_to_a_device() -> None:
    model = build_model(config(tie_word_embeddings=True), options=META)
    assert model.aliases.names == {"lm_head.weight": "model.embed_tokens.weight"}
    materialise(model, "cpu")
    head, embedding = (
        dict(model.named_parameters(remove_duplicate=False))[name]
        for name in ("lm_head.weight", "model.embed_tokens.weight")
    )
    assert head is embedding
    assert head.data_ptr() == embedding.data_ptr() != 0
    assert attached_loader(head) is not None


def test_plain_tree_has_the_checkpoint_as_it_is() -> None:
    tensors = {
        "a": torch.arange(3),
        "a.b": torch.randn(2, 2).bfloat16(),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(2, 2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(2),
        "lm_head.bias": torch.randn(2).half(),
        "forward": torch.tensor(True),
        "..": torch.zeros(0, 3),
    }
    specs = [
        CheckpointSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    for central in (False, True):
        model = build_plain(specs)
        report = model.load_weights(tensors.items(), central=central)
        assert report.loaded == tensors.keys()
        assert model.state_dict().keys() == tensors.keys()
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
def test_plain_tree_has_no_optional_names(central: bool) -> None:
    model = build_plain([CheckpointSpec(name="a.weight", dtype="float32", shape=(2,))])
    with pytest.raises(NamesError, match=r"a\.bias"):
        model.load_weights([("a.weight", torch.ones(2)), ("a.bias", torch.zeros(2))], central=central)


def test_plain_tree_of_meta_becomes_real() -> None:
    model = build_plain([CheckpointSpec(name="a.b", dtype="float32", shape=(2,))], device="meta")
    assert isinstance(model, nn.Module)
    materialise(model, "cpu")
    model.load_weights([("a.b", torch.ones(2))])
    assert model.state_dict()["a.b"].tolist() == [1.0, 1.0]


def test_plain_tree_refuses_a_name_twice() -> None:
    spec = CheckpointSpec(name="a", dtype="float32", shape=())
    with pytest.raises(ConfigError):
        build_plain([spec, spec])


def test_architecture_is_registered_once() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        registers_architecture("LlamaForCausalLM")(LlamaForCausalLM)
