"""The models that the trace is proven on: tiny configurations, and what of each cannot be traced.

Sizes are awkward on purpose: the vocabulary has to be padded for two ranks, and expert counts are no powers of two
where that is allowed. Published names and shapes come from transformers, which knows how to save each of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

Config = Mapping[str, object]

# Of each attention layer; a checkpoint has them if its KV cache is quantised.
DEFAULTS = frozenset({"_k_scale", "_v_scale", "_q_scale", "_prob_scale"})

_DECODER: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 509,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROUTED: Config = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT_ATTENTION: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model class of vLLM with a configuration.

    Attributes:
        title: What makes the case one of its own.
        config: The config.json.
        dtype: Of the checkpoint; shells are bfloat16, but for what a model keeps in float32.
        opaque: Runtime names of the parameters that vLLM's loader computes, rather than copies.
        opaque_after_first: Those that it computes on all tensor-parallel ranks but the first.
        expert_parallel: Whether experts lie whole on one rank each.
        computes_while_built: Whether layers compute with tensors while they are built, which takes real ones.
        has_output_of_its_own: Whether the checkpoint of a tied model holds the output layer nevertheless.
    """

    title: str
    config: Config
    dtype: torch.dtype = torch.bfloat16
    opaque: frozenset[str] = frozenset()
    opaque_after_first: frozenset[str] = frozenset()
    expert_parallel: bool = False
    computes_while_built: bool = False
    has_output_of_its_own: bool = False

    def opaque_on(self, tp_rank: int) -> frozenset[str]:
        return self.opaque | self.opaque_after_first if tp_rank else self.opaque

    def write_config(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(dict(self.config)))

    def make_tensors(self, folder: Path) -> dict[str, torch.Tensor]:
        """The whole checkpoint, by published name and in the order of the published files, random everywhere."""
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)  # type: ignore[no-untyped-call]
        state = model.state_dict()
        if not self.has_output_of_its_own:
            state = {name: tensor for name, tensor in state.items() if name not in model.all_tied_weights_keys}
        published = revert_weight_conversion(model, state)
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(tensor.shape, generator=generator).mul_(0.1).to(tensor.dtype)
            for name, tensor in published.items()
        }


def _decoder(name: str, model_type: str, **changes: object) -> Config:
    return {**_DECODER, "architectures": [name], "model_type": model_type, **changes}


def _layers(pattern: str, *layers: int) -> frozenset[str]:
    return frozenset(pattern.format(layer) for layer in layers)


_QWEN3_MOE = _decoder("Qwen3MoeForCausalLM", "qwen3_moe", head_dim=16, num_experts=6, **_ROUTED)
_DEEPSEEK_V3 = _decoder(
    "DeepseekV3ForCausalLM", "deepseek_v3", **{**_ROUTED, **_LATENT_ATTENTION, "num_hidden_layers": 3}
)
_MIXTRAL = _decoder("MixtralForCausalLM", "mixtral", num_local_experts=6, num_experts_per_tok=2)

GPT_OSS = Architecture(
    title="GPT-OSS",
    # A rank's share of an expert has to be a multiple of 32.
    config=_decoder(
        "GptOssForCausalLM",
        "gpt_oss",
        head_dim=16,
        intermediate_size=128,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
    opaque=_layers("model.layers.{}.mlp.experts.routed_experts.w13_weight", 0, 1)
    | _layers("model.layers.{}.mlp.experts.routed_experts.w2_weight", 0, 1),
    # Each rank adds it to its share of a sum, so that all but the first zero it, in the checkpoint's tensor.
    opaque_after_first=_layers("model.layers.{}.mlp.experts.routed_experts.w2_bias", 0, 1),
)

ARCHITECTURES = (
    Architecture(title="Llama", config=_decoder("LlamaForCausalLM", "llama")),
    Architecture(title="Llama, float32 checkpoint", config=_decoder("LlamaForCausalLM", "llama"), dtype=torch.float32),
    Architecture(title="Qwen2", config=_decoder("Qwen2ForCausalLM", "qwen2")),
    Architecture(title="Qwen2, tied", config=_decoder("Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True)),
    Architecture(
        title="Qwen2, tied, with an output layer of its own, one KV head",
        config=_decoder("Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True, num_key_value_heads=1),
        has_output_of_its_own=True,
    ),
    Architecture(title="Qwen3", config=_decoder("Qwen3ForCausalLM", "qwen3", head_dim=16)),
    Architecture(title="Qwen3-MoE", config=_QWEN3_MOE),
    Architecture(title="Qwen3-MoE, expert parallel", config=_QWEN3_MOE, expert_parallel=True),
    Architecture(title="DeepSeek-V3", config=_DEEPSEEK_V3),
    Architecture(title="DeepSeek-V3, expert parallel", config=_DEEPSEEK_V3, expert_parallel=True),
    Architecture(title="Mixtral", config=_MIXTRAL),
    Architecture(title="Mixtral, expert parallel", config=_MIXTRAL, expert_parallel=True),
    Architecture(title="OLMoE", config=_decoder("OlmoeForCausalLM", "olmoe", num_experts=6, num_experts_per_tok=2)),
    Architecture(
        title="Qwen2-MoE",
        config=_decoder(
            "Qwen2MoeForCausalLM", "qwen2_moe", num_experts=6, shared_expert_intermediate_size=32, **_ROUTED
        ),
    ),
    Architecture(
        title="Granite-MoE",
        config=_decoder("GraniteMoeForCausalLM", "granitemoe", num_local_experts=6, num_experts_per_tok=2),
    ),
    Architecture(
        title="Qwen3-Next",
        config=_decoder(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            head_dim=16,
            num_experts=6,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            **_ROUTED,
        ),
    ),
    Architecture(title="Phi-3", config=_decoder("Phi3ForCausalLM", "phi3")),
    Architecture(title="GLM-4", config=_decoder("Glm4ForCausalLM", "glm4", head_dim=16)),
    Architecture(
        title="Gemma 2",
        config=_decoder("Gemma2ForCausalLM", "gemma2", head_dim=16, query_pre_attn_scalar=16),
    ),
    Architecture(
        title="Gemma 3",
        config=_decoder("Gemma3ForCausalLM", "gemma3_text", head_dim=16, query_pre_attn_scalar=16),
    ),
    Architecture(title="Command R", config=_decoder("CohereForCausalLM", "cohere")),
    Architecture(title="StableLM", config=_decoder("StableLmForCausalLM", "stablelm")),
    Architecture(title="OPT", config=_decoder("OPTForCausalLM", "opt", ffn_dim=96, word_embed_proj_dim=64)),
    Architecture(
        title="GPT-2", config=_decoder("GPT2LMHeadModel", "gpt2", n_embd=64, n_head=4, n_layer=2, n_positions=64)
    ),
    Architecture(
        title="GPT-NeoX, a class of transformers within vLLM", config=_decoder("GPTNeoXForCausalLM", "gpt_neox")
    ),
    Architecture(
        title="Bloom",
        config=_decoder("BloomForCausalLM", "bloom", n_head=4, n_layer=2),
        opaque=_layers("transformer.h.{}.self_attention.query_key_value.weight", 0, 1)
        | _layers("transformer.h.{}.self_attention.query_key_value.bias", 0, 1),
        computes_while_built=True,
    ),
    Architecture(
        title="Falcon",
        config=_decoder(
            "FalconForCausalLM", "falcon", num_kv_heads=2, new_decoder_architecture=True, bias=False, alibi=False
        ),
        opaque=_layers("transformer.h.{}.self_attention.query_key_value.weight", 0, 1),
    ),
    Architecture(
        title="Llama 4",
        config=_decoder(
            "Llama4ForCausalLM",
            "llama4_text",
            head_dim=16,
            intermediate_size_mlp=96,
            num_local_experts=6,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
        ),
        opaque=_layers("model.layers.{}.self_attn.qkv_proj.weight", 0, 1),
    ),
    GPT_OSS,
    Architecture(
        title="Mamba",
        config=_decoder("MambaForCausalLM", "mamba", state_size=8),
        opaque=_layers("backbone.layers.{}.mixer.A", 0, 1),
    ),
    Architecture(
        title="Mamba-2",
        config=_decoder("Mamba2ForCausalLM", "mamba2", state_size=8, head_dim=16, num_heads=8, n_groups=2),
        opaque=_layers("backbone.layers.{}.mixer.A", 0, 1),
    ),
    Architecture(
        title="Jamba, attention and Mamba layers",
        config=_decoder(
            "JambaForCausalLM",
            "jamba",
            num_hidden_layers=4,
            num_experts=6,
            num_experts_per_tok=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=8,
        ),
        opaque=_layers("model.layers.{}.mamba.A", 0, 2),
    ),
    Architecture(
        title="Nemotron-H, Mamba-2, attention and MLP layers",
        config=_decoder(
            "NemotronHForCausalLM",
            "nemotron_h",
            hybrid_override_pattern="M*-",
            head_dim=16,
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=2,
        ),
        opaque=_layers("model.layers.{}.mixer.A", 0),
    ),
)
