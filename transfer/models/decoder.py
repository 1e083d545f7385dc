"""The decoder that dense and MoE architectures share; what differs between them is in their own files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from weightwire.transfer.loading.expert_names import ExpertTable
from weightwire.transfer.loading.resolver import NameTables
from weightwire.transfer.models.blueprint import Blueprint
from weightwire.transfer.models.config import ModelConfig
from weightwire.transfer.models.layers import (
    AttentionOutputLinear,
    FusedMoE,
    KvScales,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from weightwire.transfer.models.self_loading import StackedBlock
from weightwire.transfer.models.tree import ParameterTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Which of the optional parameters an architecture has.

    Attributes:
        qkv_bias: Biases of q, k and v.
        output_bias: Of attention's output projection.
        mlp_bias: Of the dense MLPs' layers.
        head_norms: Norms of queries and keys, each over one head.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False


class Attention(StackedBlock):
    """Fused q, k, v and the output projection."""

    def __init__(self, blueprint: Blueprint, path: str, traits: Traits) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(blueprint, f"{path}.qkv_proj", bias=traits.qkv_bias)
        self.o_proj = AttentionOutputLinear(blueprint, f"{path}.o_proj", bias=traits.output_bias)
        if traits.head_norms:
            self.q_norm = RMSNorm(blueprint, blueprint.config.head_dim)
            self.k_norm = RMSNorm(blueprint, blueprint.config.head_dim)
        if blueprint.options.kv_scales:
            self.attn = KvScales()


class Mlp(StackedBlock):
    """Fused gate and up, and down."""

    def __init__(self, blueprint: Blueprint, path: str, *, size: int, bias: bool = False) -> None:
        super().__init__()
        hidden = blueprint.config.hidden_size
        self.gate_up_proj = MergedColumnParallelLinear(
            blueprint, f"{path}.gate_up_proj", inputs=hidden, size=size, bias=bias
        )
        self.down_proj = RowParallelLinear(blueprint, f"{path}.down_proj", inputs=size, outputs=hidden, bias=bias)


class SparseMlp(StackedBlock):
    """A router, grouped experts, and a shared expert with a gate of its own if the model has one."""

    def __init__(self, blueprint: Blueprint, path: str) -> None:
        super().__init__()
        hidden, experts = blueprint.config.hidden_size, blueprint.experts
        self.gate = ReplicatedLinear(blueprint, f"{path}.gate", inputs=hidden, outputs=experts.num_experts)
        self.experts = FusedMoE(blueprint, f"{path}.experts")
        if experts.shared_intermediate_size is not None:
            self.shared_expert = Mlp(blueprint, f"{path}.shared_expert", size=experts.shared_intermediate_size)
            self.shared_expert_gate = ReplicatedLinear(
                blueprint, f"{path}.shared_expert_gate", inputs=hidden, outputs=1
            )


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, blueprint: Blueprint, path: str, *, layer: int, traits: Traits) -> None:
        super().__init__()
        config = blueprint.config
        self.input_layernorm = RMSNorm(blueprint, config.hidden_size)
        self.self_attn = Attention(blueprint, f"{path}.self_attn", traits)
        self.post_attention_layernorm = RMSNorm(blueprint, config.hidden_size)
        self.mlp: nn.Module
        if config.has_experts(layer):
            self.mlp = SparseMlp(blueprint, f"{path}.mlp")
        else:
            self.mlp = Mlp(blueprint, f"{path}.mlp", size=config.intermediate_size, bias=traits.mlp_bias)


class Decoder(nn.Module):
    """The layers of one pipeline stage, under their numbers in the whole model."""

    def __init__(self, blueprint: Blueprint, make_layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        if blueprint.is_first_stage:
            self.embed_tokens = VocabParallelEmbedding(blueprint)
        self.layers = nn.ModuleDict({str(layer): make_layer(layer) for layer in blueprint.layers})
        if blueprint.is_last_stage:
            self.norm = RMSNorm(blueprint, blueprint.config.hidden_size)


class DecoderTree(ParameterTree):
    """A decoder with an output head. An architecture is a subclass with its `traits`, or with layers of its own."""

    config: ModelConfig
    # Whether the architecture can have layers with experts.
    has_experts: ClassVar[bool] = False
    # The tree of the layers that draft tokens; None for an architecture that has none.
    draft: ClassVar[type[DecoderTree] | None] = None

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.config, self.place = blueprint.config, blueprint.place
        self.placement = blueprint.expert_placement
        self.model = Decoder(blueprint, lambda layer: self.decoder_layer(blueprint, layer))
        if blueprint.is_last_stage:
            self.lm_head = ParallelLMHead(blueprint)
            if self.config.tie_word_embeddings and blueprint.is_first_stage and not blueprint.options.separate_head:
                self.lm_head.weight = self.model.embed_tokens.weight
        self.seal(self.tables_of(blueprint))

    @classmethod
    def traits(cls, config: ModelConfig) -> Traits:
        """Which optional parameters the model has."""
        return Traits()

    @classmethod
    def decoder_layer(cls, blueprint: Blueprint, layer: int) -> nn.Module:
        """One layer of the decoder.

        Args:
            blueprint: See `build_model`.
            layer: Its number in the whole model.
        """
        return DecoderLayer(blueprint, f"model.layers.{layer}", layer=layer, traits=cls.traits(blueprint.config))

    @classmethod
    def tables_of(cls, blueprint: Blueprint) -> NameTables:
        """What the names of the checkpoint mean on this rank."""
        config = blueprint.config
        return NameTables(
            layers=blueprint.layers,
            num_layers=config.num_layers,
            experts=ExpertTable(config.experts.num_experts) if config.experts is not None else None,
            owns_embedding=blueprint.is_first_stage,
            owns_final_norm=blueprint.is_last_stage,
            owns_head=blueprint.is_last_stage,
            tied=config.tie_word_embeddings,
            mapper=blueprint.renames,
        )
