"""Both ways of loading give the same shells, and transformers loads the same folders.

There is no forward here, so equal output is shown by what decides it: every entry of the state dict, bit for bit. One
test lets transformers' own forward speak for the walker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from tests.transfer.models.conftest import FAMILIES, Saved, differences, poisoned, ranks, same_bytes, write_folder
from weightwire.transfer.errors import NamesError, PlacementError
from weightwire.transfer.loading.loop import load_weights
from weightwire.transfer.loading.mappers import WeightsMapper
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.loading.resolver import NameTables
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import (
    Blueprint,
    BuildOptions,
    LlamaForCausalLM,
    ModelConfig,
    ParameterTree,
    architectures,
    build_defaults,
    parse_config,
    registers_architecture,
)
from weightwire.transfer.ranks import RankPlace

Tensors = Mapping[str, torch.Tensor]
TOY: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [4, 4]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One checkpoint and one way to lay it out.

    Attributes:
        config: What differs from the toy's `config.json`.
        topology: Of the instance.
        options: Of the build.
        extra: Tensors that the file has besides.
        scale: Ending of the name of each FP8 weight's scale in the file.
    """

    config: Mapping[str, object] = field(default_factory=dict)
    topology: Topology = field(default_factory=Topology)
    options: BuildOptions = field(default_factory=BuildOptions)
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scale: str = "weight_scale_inv"

    @property
    def parsed(self) -> ModelConfig:
        return parse_config({**TOY, **self.config})

    def tensors(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        config = self.parsed
        found = {"model.embed_tokens.weight": torch.randn(8, 8), "model.norm.weight": torch.randn(8)}
        if not config.tie_word_embeddings:
            found["lm_head.weight"] = torch.randn(8, 8)
        found = {name: tensor.bfloat16() for name, tensor in found.items()}
        for layer in range(config.num_layers):
            found |= {f"model.layers.{layer}.{name}": tensor for name, tensor in self._layer(config).items()}
        return found | dict(self.extra)

    def _layer(self, config: ModelConfig) -> dict[str, torch.Tensor]:
        kv = config.num_kv_heads * config.head_dim
        linears = {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (kv, 8), "self_attn.v_proj": (kv, 8)}
        linears |= {"self_attn.o_proj": (8, 8), "mlp.down_proj": (8, 16)}
        linears |= {"mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8)}
        found = {
            f"{norm}.weight": torch.randn(8).bfloat16() for norm in ("input_layernorm", "post_attention_layernorm")
        }
        for name, (rows, cols) in linears.items():
            dtype = torch.bfloat16 if config.fp8 is None else torch.float8_e4m3fn
            found[f"{name}.weight"] = torch.randn(rows, cols).to(dtype)
            if config.fp8 is not None:
                block = config.fp8.block
                shape = (-(-rows // block[0]), -(-cols // block[1])) if block else ()
                found[f"{name}.{self.scale}"] = torch.rand(shape)
            if config.fp8 is not None and config.fp8.activations == "static":
                found[f"{name}.activation_scale"] = torch.rand(())
            if config.architecture.startswith("Qwen2") and name.endswith(("q_proj", "k_proj", "v_proj")):
                found[f"{name}.bias"] = torch.randn(rows).bfloat16()
        return found


KV = {f"model.layers.{layer}.self_attn.{p}_proj.{p}_scale": torch.rand(()) for layer in range(2) for p in "kv"}
OLD_KV = {f"model.layers.{layer}.self_attn.kv_scale": torch.rand(()) for layer in range(2)}
VARIANTS = {
    "untied": Variant(),
    "tied": Variant(config={"tie_word_embeddings": True}),
    "tied with a head in the file": Variant(
        config={"tie_word_embeddings": True}, extra={"lm_head.weight": torch.ones(8, 8).bfloat16()}
    ),
    "tied with a head of its own": Variant(
        config={"tie_word_embeddings": True}, topology=Topology(tp=2), options=BuildOptions(separate_head=True)
    ),
    "pp 2": Variant(topology=Topology(pp=2)),
    "pp 2, tied": Variant(topology=Topology(pp=2), config={"tie_word_embeddings": True}),
    "tp 2": Variant(topology=Topology(tp=2)),
    "tp 4, pp 2, more ranks than kv heads": Variant(topology=Topology(tp=4, pp=2)),
    "block FP8": Variant(config={"quantization_config": FP8}),
    "block FP8 named otherwise": Variant(config={"quantization_config": FP8}, scale="weight_scale"),
    "block FP8 on tp 2": Variant(
        config={"quantization_config": {**FP8, "weight_block_size": [2, 4]}}, topology=Topology(tp=2)
    ),
    "FP8 with one scale, static": Variant(
        config={"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, scale="weight_scale"
    ),
    "FP8 of an architecture without renames": Variant(
        config={"quantization_config": FP8, "architectures": ["Qwen2ForCausalLM"]}, scale="weight_scale"
    ),
    "k and v scales": Variant(extra=KV, options=BuildOptions(kv_scales=True)),
    "k and v scales that nobody wants": Variant(extra=KV),
    "old scales of the KV cache": Variant(extra=OLD_KV, options=BuildOptions(kv_scales=True)),
    "names that have no module to be asked": Variant(
        config={"tie_word_embeddings": True},
        extra={
            "lm_head": torch.zeros(1),
            "model.layers.0.indexer.wk.weight": torch.zeros(1),
            "model.layers.9.self_attn.kv_scale": torch.zeros(()),
            "model.layers.9.self_attn.k_proj.k_scale": torch.zeros(()),
            "model.layers.0.input_layernorm.v_scale": torch.zeros(()),
        },
    ),
    "biases of zeros and rotary tables": Variant(
        extra={
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(8),
            "model.layers.1.mlp.up_proj.bias": torch.zeros(16),
            "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(2),
        }
    ),
}


def loaded(variant: Variant, rank: int, pairs: Iterable[tuple[str, torch.Tensor]], *, central: bool) -> ParameterTree:
    model = poisoned(variant.parsed, variant.topology, rank, variant.options)
    model.load_weights(pairs, central=central)
    return model


# L79, C3
@pytest.mark.parametrize("name", VARIANTS)
def test_both_ways_give_the_same_state_dict(name: str) -> None:
    variant = VARIANTS[name]
    tensors = variant.tensors()
    for rank in ranks(variant.topology):
        first, second = (loaded(variant, rank, tensors.items(), central=central) for central in (False, True))
        assert differences(first, second) == []


# L79, C3
@pytest.mark.parametrize("name", VARIANTS)
def test_both_ways_count_the_same_outcomes(name: str) -> None:
    variant = VARIANTS[name]
    tensors = variant.tensors()
    for rank in ranks(variant.topology):
        models = (poisoned(variant.parsed, variant.topology, rank, variant.options) for _ in range(2))
        first, second = (
            model.load_weights(tensors.items(), central=central)
            for model, central in zip(models, (False, True), strict=True)
        )
        assert [(o.name, o.outcome, o.target, o.slot) for o in first.outcomes if o.is_read] == [
            (o.name, o.outcome, o.target, o.slot) for o in second.outcomes if o.is_read
        ]
        assert first.counts == second.counts
        assert first.loaded == second.loaded


# L79, C3
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2, pp=2), Topology(tp=4, ep=2)], ids=str)
def test_both_ways_load_what_transformers_saved(family: str, topology: Topology, saved: Callable[[str], Saved]) -> None:
    checkpoint = saved(family)
    for rank in ranks(topology):
        first, second = (poisoned(checkpoint.config, topology, rank) for _ in range(2))
        first.load_weights(checkpoint.tensors.items())
        second.load_weights(reversed(list(checkpoint.tensors.items())), central=True)
        assert differences(first, second) == []


# L76, L79
def test_both_ways_skip_paths_and_not_names_that_begin_alike() -> None:
    class Blind(LlamaForCausalLM):
        def seal(self, tables: NameTables) -> None:
            super().seal(replace(tables, skip_prefixes=("visual", "model.layers.1.extra.")))

    skipped = ("visual", "visual.x", "model.layers.1.extra.weight")
    kept = ("visualizer.x", "model.layers.1.extras.weight")
    variant = Variant(extra={name: torch.zeros(1) for name in (*skipped, *kept)})
    blueprint = Blueprint(
        config=variant.parsed, place=RankPlace.of(variant.topology, 0), options=BuildOptions(), renames=WeightsMapper()
    )
    for central in (False, True):
        with build_defaults("cpu", torch.bfloat16):
            model = Blind(blueprint)
        report = model.load_weights(variant.tensors().items(), central=central, unexpected="warn")
        assert [o.name for o in report.outcomes if o.outcome is Outcome.DROPPED] == list(skipped)
        assert report.unexpected == kept


# L79, C3
@pytest.mark.parametrize(
    "unknown", ["model.layers.0.foo.weight", "model.layers.0.self_attn.q_porj.weight", "x", "model.norm.weight."]
)
def test_both_ways_refuse_the_same_unknown_name(unknown: str) -> None:
    variant = Variant(extra={unknown: torch.zeros(8)})
    for central in (False, True):
        with pytest.raises(NamesError) as caught:
            loaded(variant, 0, variant.tensors().items(), central=central)
        assert caught.value.facts["unexpected"] == [unknown]


# L70, L79, C3
def test_both_ways_may_be_told_to_warn_of_an_unknown_name(caplog: pytest.LogCaptureFixture) -> None:
    variant = Variant(extra={"model.layers.0.foo.weight": torch.zeros(8)})
    first, second = (poisoned(variant.parsed) for _ in range(2))
    first.load_weights(variant.tensors().items(), unexpected="warn")
    second.load_weights(variant.tensors().items(), central=True, unexpected="warn")
    assert differences(first, second) == []
    assert caplog.text.count("model.layers.0.foo.weight") >= 2


# L79, L92, D04
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
def test_both_ways_say_in_which_layer_a_tensor_does_not_fit(central: bool) -> None:
    variant = Variant(extra={"model.layers.1.self_attn.k_proj.weight": torch.zeros(2, 8).bfloat16()})
    with pytest.raises(PlacementError, match=r"model\.layers\.1\.self_attn.*qkv_proj\.weight.*Attempted") as caught:
        loaded(variant, 0, variant.tensors().items(), central=central)
    assert caught.value.facts["diagnostic"] == "D04"


# L78
def test_way_of_a_load_is_chosen_by_its_flag() -> None:
    variant = Variant()
    by_tables = poisoned(variant.parsed).load_weights(variant.tensors().items())
    by_walk = poisoned(variant.parsed).load_weights(variant.tensors().items(), central=True)
    assert {outcome.rule for outcome in by_tables.outcomes} == {"L91", "L54"}
    assert {outcome.rule for outcome in by_walk.outcomes} == {"L74", "L91", "L54"}
    by_default = poisoned(variant.parsed).load_weights(variant.tensors().items())
    assert by_default == by_tables


# L52
def test_block_scales_have_the_name_that_the_architecture_gives_them() -> None:
    variant = VARIANTS["block FP8"]
    tensors = variant.tensors()
    model = loaded(variant, 0, tensors.items(), central=False)
    scale = model.get_parameter("model.layers.0.self_attn.qkv_proj.weight_scale")
    parts = [tensors[f"model.layers.0.self_attn.{part}_proj.weight_scale_inv"] for part in "qkv"]
    assert same_bytes(scale, torch.cat(parts))


class Renamed(LlamaForCausalLM):
    """A format with renames that must be applied once, and a tensor that it wants dropped."""

    quantisation_mapper = WeightsMapper(
        suffixes={".weight_scale_inv": ".scale_of_weight", ".scale_of_weight": ".twice", ".zero_point": None}
    )


# L52, L72
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
def test_renames_of_a_format_name_the_shells_and_find_them(central: bool) -> None:
    if "RenamedForCausalLM" not in architectures():
        registers_architecture("RenamedForCausalLM")(Renamed)
    variant = Variant(
        config={"quantization_config": FP8, "architectures": ["RenamedForCausalLM"]},
        extra={"model.layers.0.mlp.down_proj.zero_point": torch.ones(1), "model.zero_point": torch.ones(1)},
    )
    model, tensors = poisoned(variant.parsed), variant.tensors()
    report = model.load_weights(tensors.items(), central=central)
    assert report.counts[Outcome.DROPPED] == 2
    assert [outcome.name for outcome in report.outcomes] == list(tensors)
    scale = model.get_parameter("model.layers.1.mlp.down_proj.scale_of_weight")
    assert same_bytes(scale, tensors["model.layers.1.mlp.down_proj.weight_scale_inv"])
    assert "model.layers.1.self_attn.qkv_proj.scale_of_weight" in report.loaded


# L82
def test_scales_of_the_kv_cache_are_one_unless_the_checkpoint_says_otherwise() -> None:
    silent = replace(VARIANTS["k and v scales"], extra={})
    model = loaded(silent, 0, silent.tensors().items(), central=False)
    assert model.get_parameter("model.layers.0.self_attn.attn.k_scale").item() == 1.0
    old = VARIANTS["old scales of the KV cache"]
    for central in (False, True):
        model = loaded(old, 0, old.tensors().items(), central=central)
        for letter in "kv":
            shell = model.get_parameter(f"model.layers.1.self_attn.attn.{letter}_scale")
            assert same_bytes(shell, OLD_KV["model.layers.1.self_attn.kv_scale"])


# L79
@pytest.mark.parametrize("family", ["llama", "llama with biases", "llama, tied", "qwen2", "qwen3_moe", "qwen2_moe"])
def test_transformers_loads_the_same_folder(family: str, saved: Callable[[str], Saved]) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint = saved(family)
    stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.bfloat16)
    ours = poisoned(checkpoint.config)
    ours.load_weights(checkpoint.tensors.items())
    theirs = stock.state_dict()
    # Norms, the output projections and the first rows of the embedding have the same names and shapes.
    shared = [
        name for name in ours.state_dict() if name in theirs and theirs[name].shape == ours.state_dict()[name].shape
    ]
    assert len(shared) > 5 * checkpoint.config.num_layers - 5
    assert [name for name in shared if not same_bytes(ours.state_dict()[name], theirs[name])] == []
    q, k, v = (theirs[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    assert same_bytes(ours.get_parameter("model.layers.0.self_attn.qkv_proj.weight"), torch.cat([q, k, v]))


# L79
def test_toy_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tensors = Variant().tensors()
    folder = write_folder(tmp_path, {**TOY, "model_type": "llama"}, tensors)
    stock, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values())
    assert [name for name, tensor in tensors.items() if not same_bytes(stock.state_dict()[name], tensor)] == []


# L74, L79
@pytest.mark.parametrize("family", ["llama", "llama, tied", "qwen2"])
def test_stock_model_filled_by_a_walk_says_the_same(family: str, saved: Callable[[str], Saved]) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint = saved(family)
    stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.bfloat16).eval()
    blank = transformers.AutoModelForCausalLM.from_config(stock.config).to(torch.bfloat16).eval()
    load_weights(blank, checkpoint.tensors.items(), central=True)
    assert differences(blank, stock) == []
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        logits = [model(tokens).logits for model in (blank, stock)]
    assert same_bytes(*logits)
    assert torch.equal(*(output.argmax(-1) for output in logits))
