"""Llama, and what is built like it."""

from __future__ import annotations

from weightwire.transfer.models.config import ModelConfig
from weightwire.transfer.models.decoder import DecoderTree, Traits
from weightwire.transfer.models.registry import registers_architecture


@registers_architecture("LlamaForCausalLM", "MistralForCausalLM")
class LlamaForCausalLM(DecoderTree):
    """A dense decoder; biases only if the configuration asks for them."""

    @classmethod
    def traits(cls, config: ModelConfig) -> Traits:
        """Attention's biases come all together."""
        biased = bool(config.attention_bias)
        return Traits(qkv_bias=biased, output_bias=biased, mlp_bias=config.mlp_bias)
