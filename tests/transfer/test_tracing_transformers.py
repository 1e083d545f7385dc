"""Loaders of others: `load_state_dict` of models that transformers builds, traced on meta and compared with itself.

Sizes are the smallest that an architecture takes; a few have fields of their own for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.replay import check_trace
from weightwire.transfer.tracing import LoadWeights, trace_placement

SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("intermediate_size", "d_ff", "hidden_dim", "ffn_dim", "ffn_hidden_size"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 32),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "eos_token_id"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1),
    "pad_token_id": 0,
}
CAUSAL = (
    *("bloom", "cohere", "deepseek_v3", "falcon", "gemma2", "gpt2", "gpt_neox", "gptj", "granite", "granitemoe"),
    *("llama", "mamba", "mamba2", "mistral", "mixtral", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "stablelm", "starcoder2"),
)
MASKED = ("albert", "bert", "distilbert", "electra", "roberta")
SEQ2SEQ = ("bart", "t5")
ARCHITECTURES = [
    *(pytest.param(name, AutoModelForCausalLM, id=name) for name in CAUSAL),
    *(pytest.param(name, AutoModelForMaskedLM, id=name) for name in MASKED),
    *(pytest.param(name, AutoModelForSeq2SeqLM, id=name) for name in SEQ2SEQ),
]
Factory = type[AutoModelForCausalLM]


def tiny(architecture: str) -> PreTrainedConfig:
    config = AutoConfig.for_model(architecture)
    for field, size in SIZES.items():
        # Some fields follow from others.
        with contextlib.suppress(AttributeError):
            if hasattr(config, field):
                setattr(config, field, size)
    return config


def built(architecture: str, factory: Factory) -> nn.Module:
    model = factory.from_config(tiny(architecture))  # type: ignore[no-untyped-call]  # transformers annotates it not
    assert isinstance(model, nn.Module)
    return model


def loader(model: nn.Module) -> LoadWeights:
    def load(pairs: Iterator[tuple[str, Tensor]]) -> None:
        model.load_state_dict(dict(pairs), strict=True)

    return load


def shells_of_all(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict(keep_vars=True))


def random_checkpoint(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(list(model.parameters())))
    return {
        name: torch.randint(0, 100, shell.shape, generator=generator).to(shell.dtype)
        for name, shell in shells_of_all(model).items()
    }


@pytest.mark.parametrize(("architecture", "factory"), ARCHITECTURES)
def test_every_tensor_of_a_transformers_model_is_traced(architecture: str, factory: Factory) -> None:
    with torch.device("meta"):
        model = built(architecture, factory)
    checkpoint = random_checkpoint(model)
    specs = [
        CheckpointSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in checkpoint.items()
    ]
    trace = trace_placement(loader(model), shells_of_all(model), specs)
    assert (trace.opaque, trace.uncovered) == ({}, {})
    assert trace.used == checkpoint.keys()

    def build() -> tuple[LoadWeights, Mapping[str, Tensor]]:
        real = built(architecture, factory)
        return loader(real), shells_of_all(real)

    found = check_trace(build, checkpoint)
    found.check_equal()
    assert found.trace == trace
