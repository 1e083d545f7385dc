"""Parameter trees without forward, built from a Hugging Face `config.json` for one rank of a topology."""

from weightwire.transfer.models.blueprint import Blueprint, BuildOptions
from weightwire.transfer.models.building import AliasTable, MemoryAccount, build_defaults, materialise, memory_phase
from weightwire.transfer.models.config import ExpertConfig, Fp8Config, ModelConfig
from weightwire.transfer.models.deepseek_v3 import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    DeepseekV3ForCausalLMNextN,
)
from weightwire.transfer.models.latent_config import IndexerConfig, LatentConfig
from weightwire.transfer.models.llama import LlamaForCausalLM
from weightwire.transfer.models.plain import PlainTree, build_plain
from weightwire.transfer.models.qwen2 import Qwen2ForCausalLM
from weightwire.transfer.models.qwen3_moe import Qwen2MoeForCausalLM, Qwen3MoeForCausalLM
from weightwire.transfer.models.registry import (
    architectures,
    build_model,
    parse_config,
    plan_memory,
    registers_architecture,
)
from weightwire.transfer.models.tree import ParameterTree

__all__ = [
    "AliasTable",
    "Blueprint",
    "BuildOptions",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV3ForCausalLMNextN",
    "ExpertConfig",
    "Fp8Config",
    "IndexerConfig",
    "LatentConfig",
    "LlamaForCausalLM",
    "MemoryAccount",
    "ModelConfig",
    "ParameterTree",
    "PlainTree",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "architectures",
    "build_defaults",
    "build_model",
    "build_plain",
    "materialise",
    "memory_phase",
    "parse_config",
    "plan_memory",
    "registers_architecture",
]
