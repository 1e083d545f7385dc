"""Qwen3 with experts, and Qwen2 with experts, whose layers have a shared one besides."""

from __future__ import annotations

from weightwire.transfer.models.config import ModelConfig
from weightwire.transfer.models.decoder import DecoderTree, Traits
from weightwire.transfer.models.registry import registers_architecture


@registers_architecture("Qwen3MoeForCausalLM")
class Qwen3MoeForCausalLM(DecoderTree):
    """Norms of queries and keys; experts in all layers but those that the configuration leaves dense."""

    has_experts = True

    @classmethod
    def traits(cls, config: ModelConfig) -> Traits:
        """Attention's biases come all together."""
        biased = bool(config.attention_bias)
        return Traits(qkv_bias=biased, output_bias=biased, head_norms=True)


@registers_architecture("Qwen2MoeForCausalLM")
class Qwen2MoeForCausalLM(DecoderTree):
    """Biases of q, k and v unless the configuration says otherwise; a shared expert beside the routed ones."""

    has_experts = True

    @classmethod
    def traits(cls, config: ModelConfig) -> Traits:
        """Biases are told by a field of this architecture's own."""
        return Traits(qkv_bias=config.qkv_bias is not False)
