"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from weightwire.transfer.models.config import ModelConfig
from weightwire.transfer.models.decoder import DecoderTree, Traits
from weightwire.transfer.models.registry import registers_architecture


@registers_architecture("Qwen2ForCausalLM")
class Qwen2ForCausalLM(DecoderTree):
    """Like Llama, with biases of q, k and v, whatever the configuration says."""

    @classmethod
    def traits(cls, config: ModelConfig) -> Traits:
        """The same for every model of the family."""
        return Traits(qkv_bias=True)
