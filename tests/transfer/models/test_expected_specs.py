"""What config.json says about a checkpoint, against the checkpoint that transformers writes for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch

from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.errors import ConfigError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.loading.base_loaders import WholeLoader
from weightwire.transfer.loading.mappers import WeightsMapper, registers_remap
from weightwire.transfer.loading.slots import SlotId, attach_loader
from weightwire.transfer.manifest import CheckpointSpec, Topology
from weightwire.transfer.models import (
    Blueprint,
    BuildOptions,
    LlamaForCausalLM,
    architectures,
    parse_config,
    registers_architecture,
)
from weightwire.transfer.models.expected_specs import expected_specs
from weightwire.transfer.tree_shells import build_rank

# Nothing divides anything else: 9 heads and 3 groups of 6, 6 experts, a vocabulary that needs padding.
SIZES: Mapping[str, object] = {
    "vocab_size": 37,
    "hidden_size": 18,
    "intermediate_size": 15,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 6,
    "num_hidden_layers": 3,
}
EXPERTS: Mapping[str, object] = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}  # fmt: skip
LATENT: Mapping[str, object] = {
    "num_key_value_heads": 9, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 7,
    "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3,
}  # fmt: skip
# Kept in float32, whatever the rest of the model is, and published so.
ALWAYS_FLOAT32 = ("e_score_correction_bias", "indexer.k_norm.weight", "indexer.k_norm.bias")
# Not transformers' own: the draft layer of DeepSeek alone.
WITHOUT_STOCK = {"DeepseekV3ForCausalLMNextN"}
# Name of the classes in transformers, and what else the configuration says.
MODELS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 22}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen3_moe with biases": ("Qwen3Moe", {**EXPERTS, "attention_bias": True}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "attention_bias": True}),
    "deepseek_v32": ("DeepseekV32", {**LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2}),
}


def save_stock_model(folder: Path, model: str, *, tied: bool, dtype: torch.dtype) -> None:
    """The checkpoint of a tiny model, as transformers writes it."""
    import transformers

    stem, more = MODELS[model]
    sizes = {**SIZES, **more, "tie_word_embeddings": tied}
    if stem.startswith("Qwen2"):
        # Their heads are as wide as the hidden size makes them.
        sizes |= {"hidden_size": 54}
    config = getattr(transformers, f"{stem}Config")(**sizes)
    getattr(transformers, f"{stem}ForCausalLM")(config).to(dtype).save_pretrained(folder)


def facts(specs: Iterable[CheckpointSpec]) -> dict[str, tuple[str, tuple[int, ...]]]:
    listed = list(specs)
    found = {spec.name: (spec.dtype, spec.shape) for spec in listed}
    assert len(found) == len(listed)
    return found


@pytest.mark.parametrize("tied", [pytest.param(False, id="untied"), pytest.param(True, id="tied")])
@pytest.mark.parametrize("model", MODELS)
def test_expected_specs_are_those_of_the_checkpoint_that_transformers_writes(
    model: str, tied: bool, tmp_path: Path
) -> None:
    dtype = torch.float16 if tied else torch.bfloat16
    save_stock_model(tmp_path, model, tied=tied, dtype=dtype)
    with Checkpoint.open(tmp_path) as checkpoint:
        written = facts(specs_of(checkpoint))
    written |= {name: ("float32", shape) for name, (_, shape) in written.items() if name.endswith(ALWAYS_FLOAT32)}
    assert facts(expected_specs(parse_config((tmp_path / "config.json").read_text()))) == written


def test_every_architecture_is_compared_with_transformers() -> None:
    compared = {f"{stem}ForCausalLM" for stem, _ in MODELS.values()}
    assert {name for name, tree in architectures().items() if tree.__module__.startswith("weightwire.")} == (
        compared | WITHOUT_STOCK
    )


TOY: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8,
    "dtype": "bfloat16",
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [4, 4], "modules_to_not_convert": ["lm_head"]}
ONE_SCALE = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        pytest.param(
            {"quantization_config": BLOCKS},
            {"self_attn.k_proj.weight_scale_inv": ("float32", (2, 4)),
             "mlp.up_proj.weight": ("float8_e4m3fn", (32, 16))},
            id="one scale for each block",
        ),
        pytest.param(
            {"quantization_config": ONE_SCALE},
            {"self_attn.o_proj.weight_scale": ("float32", ()), "mlp.gate_proj.input_scale": ("float32", ())},
            id="one scale for each matrix, and of inputs",
        ),
        pytest.param(
            {"quantization_config": BLOCKS, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4,
             "moe_intermediate_size": 8},
            {"mlp.experts.3.up_proj.weight_scale_inv": ("float32", (2, 4)),
             "mlp.experts.0.down_proj.weight_scale_inv": ("float32", (4, 2)),
             "mlp.gate.weight": ("bfloat16", (4, 16))},
            id="blocks of experts",
        ),
        pytest.param(
            {"quantization_config": ONE_SCALE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2,
             "moe_intermediate_size": 8},
            {"mlp.experts.1.gate_proj.weight_scale": ("float32", ()),
             "mlp.experts.1.up_proj.input_scale": ("float32", ())},
            id="one scale for each matrix of an expert",
        ),
    ],
)  # fmt: skip
def test_expected_specs_know_the_scales_of_fp8(
    members: Mapping[str, object], expected: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    found = facts(expected_specs(parse_config({**TOY, **members})))
    layer = "model.layers.0."
    assert {name: found[f"{layer}{name}"] for name in expected} == expected


@pytest.mark.parametrize(
    "topology", [Topology(), Topology(tp=2), Topology(tp=2, ep=2)], ids=["one rank", "tp 2", "tp 2, ep 2"]
)
@pytest.mark.parametrize("quantised", [None, BLOCKS, ONE_SCALE], ids=["bf16", "fp8 blocks", "fp8"])
def test_expected_specs_fill_every_rank(topology: Topology, quantised: Mapping[str, object] | None) -> None:
    members = {**TOY, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 8}
    members |= {} if quantised is None else {"quantization_config": quantised}
    specs = expected_specs(parse_config(members))
    for rank in range(topology.world_size):
        identity = ModelIdentity(
            model="m", config=json.dumps(members), checkpoint=specs, topology=topology, rank=rank
        )  # fmt: skip
        _, layout = build_rank(identity, BuildOptions(device="meta"))
        assert not layout.uncovered


def test_expected_specs_turn_the_renames_of_an_architecture_around() -> None:
    members = {**TOY, "architectures": ["RenamedForExpectedSpecs"]}
    found = facts(expected_specs(parse_config(members)))
    assert found["decoder.blocks.0.self_attn.q_proj.weight"] == ("bfloat16", (16, 16))
    assert found["decoder.embed_tokens.weight"] == ("bfloat16", (8, 16))
    assert found["decoder.blocks.0.mlp.down_proj.kernel"] == ("bfloat16", (16, 32))
    assert not [name for name in found if name.startswith("model.")]


def test_expected_specs_refuse_a_shell_that_nothing_is_known_of() -> None:
    with pytest.raises(ConfigError, match=r"OpaqueForExpectedSpecs: it does not say .*'model.norm.weight'"):
        expected_specs(parse_config({**TOY, "architectures": ["OpaqueForExpectedSpecs"]}))


@registers_remap("RenamedForExpectedSpecs")
def _remap(_model: object) -> WeightsMapper:
    return WeightsMapper(
        substrings={".blocks.": ".layers."},
        prefixes={"decoder.": "model."},
        suffixes={"down_proj.kernel": "down_proj.weight"},
    )


@registers_architecture("RenamedForExpectedSpecs")
class RenamedForExpectedSpecs(LlamaForCausalLM):
    """A Llama whose files call everything otherwise."""


class _OddLoader:
    """Knows neither what it takes nor where it cuts."""

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return (None,)

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        return WholeLoader().load(shell, tensor, slot, name=name)


@registers_architecture("OpaqueForExpectedSpecs")
class OpaqueForExpectedSpecs(LlamaForCausalLM):
    """A Llama with a loader of its own."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        attach_loader(self.get_parameter("model.norm.weight"), _OddLoader())
