"""DeepSeek V2, V3 and V3.2: latent attention, dense first layers, shared experts, and a layer that drafts tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from weightwire.transfer.errors import ConfigError, TopologyError
from weightwire.transfer.loading.base_loaders import WholeLoader
from weightwire.transfer.loading.casts import float_casts
from weightwire.transfer.loading.deepseek_names import INDEXER_PARTS, LATENT_PARTS, DeepseekNames, deepseek_steps
from weightwire.transfer.loading.expert_names import ExpertTable
from weightwire.transfer.loading.resolver import NameTables
from weightwire.transfer.models.blueprint import Blueprint, Role
from weightwire.transfer.models.config import ModelConfig
from weightwire.transfer.models.decoder import Decoder, DecoderTree, Mlp
from weightwire.transfer.models.latent_attention import LatentAttention
from weightwire.transfer.models.layers import FusedMoE, ReplicatedLinear, RMSNorm
from weightwire.transfer.models.registry import registers_architecture
from weightwire.transfer.models.self_loading import StackedBlock
from weightwire.transfer.models.tree import ParameterTree

_BIAS_CASTS = float_casts("float32")
# How a router selects whose scores are corrected by a bias of each expert.
_CORRECTED = "noaux_tc"


class Router(ReplicatedLinear):
    """Scores of experts, and what is added to them for the selection alone: float32, as experts are close calls."""

    def __init__(self, blueprint: Blueprint, path: str, *, corrected: bool) -> None:
        count = blueprint.experts.num_experts
        super().__init__(blueprint, path, inputs=blueprint.config.hidden_size, outputs=count)
        if corrected:
            self.add("e_score_correction_bias", (count,), WholeLoader(casts=_BIAS_CASTS), dtype=torch.float32)


class DeepseekMoe(StackedBlock):
    """A router, grouped experts, and shared ones: one MLP, or the last of the group."""

    def __init__(self, blueprint: Blueprint, path: str, *, corrected: bool) -> None:
        super().__init__()
        experts = blueprint.experts
        self.gate = Router(blueprint, f"{path}.gate", corrected=corrected)
        self.experts = FusedMoE(blueprint, f"{path}.experts")
        if experts.shared_intermediate_size is not None and not blueprint.num_fused_shared:
            self.shared_experts = Mlp(blueprint, f"{path}.shared_experts", size=experts.shared_intermediate_size)


class DeepseekLayer(nn.Module):
    """Latent attention and an MLP, or a mixture of experts, each after a norm."""

    def __init__(self, blueprint: Blueprint, path: str, *, sparse: bool, corrected: bool) -> None:
        super().__init__()
        config = blueprint.config
        self.input_layernorm = RMSNorm(blueprint, config.hidden_size)
        self.self_attn = LatentAttention(blueprint, f"{path}.self_attn")
        self.post_attention_layernorm = RMSNorm(blueprint, config.hidden_size)
        self.mlp: nn.Module
        if sparse:
            self.mlp = DeepseekMoe(blueprint, f"{path}.mlp", corrected=corrected)
        else:
            self.mlp = Mlp(blueprint, f"{path}.mlp", size=config.intermediate_size)


def _names(blueprint: Blueprint, role: Role) -> DeepseekNames:
    config = blueprint.config
    return DeepseekNames(
        num_layers=config.num_layers,
        num_draft_layers=config.num_draft_layers,
        role=role,
        num_routed=config.experts.num_experts if config.experts is not None else None,
        fuses_shared=blueprint.num_fused_shared > 0,
    )


def _tables(tables: NameTables, blueprint: Blueprint, role: Role) -> NameTables:
    """What a decoder's names mean, with the family's own questions."""
    experts, shared = blueprint.config.experts, blueprint.num_fused_shared
    table = ExpertTable(experts.num_experts + shared, num_shared=shared) if experts is not None else None
    steps = deepseek_steps(_names(blueprint, role))
    return replace(tables, experts=table, further_parts=(INDEXER_PARTS, LATENT_PARTS), steps=steps)


@registers_architecture("DeepseekV2ForCausalLM")
class DeepseekV2ForCausalLM(DecoderTree):
    """Queries projected directly or through a latent vector; a router without corrections, unless it says so."""

    has_experts = True

    @classmethod
    def is_corrected(cls, config: ModelConfig) -> bool:
        """Whether routers have a bias of each expert."""
        return config.experts is not None and config.experts.selection == _CORRECTED

    @classmethod
    def decoder_layer(cls, blueprint: Blueprint, layer: int) -> nn.Module:
        """See `DecoderTree.decoder_layer`."""
        sparse = blueprint.config.has_experts(layer)
        path = f"model.layers.{layer}"
        return DeepseekLayer(blueprint, path, sparse=sparse, corrected=cls.is_corrected(blueprint.config))

    @classmethod
    def tables_of(cls, blueprint: Blueprint) -> NameTables:
        """See `DecoderTree.tables_of`."""
        return _tables(super().tables_of(blueprint), blueprint, "main")


@registers_architecture("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")
class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Routers corrected by a bias; with an indexer, if the configuration has one."""

    @classmethod
    def is_corrected(cls, config: ModelConfig) -> bool:
        """Newer configurations do not say what all models of the family have."""
        return config.experts is not None and config.experts.selection in (_CORRECTED, None)


class DraftModel(Decoder):
    """The decoder layer behind the last one, and what joins a token's embedding to the hidden state before it."""

    def __init__(self, blueprint: Blueprint) -> None:
        nn.Module.__init__(self)
        config, hidden = blueprint.config, blueprint.config.hidden_size
        self.enorm = RMSNorm(blueprint, hidden)
        self.hnorm = RMSNorm(blueprint, hidden)
        self.eh_proj = ReplicatedLinear(blueprint, "model.eh_proj", inputs=2 * hidden, outputs=hidden)
        self.decoder = DeepseekLayer(
            blueprint,
            "model.decoder",
            sparse=config.experts is not None,
            corrected=DeepseekV3ForCausalLM.is_corrected(config),
        )
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(blueprint, hidden)


@registers_architecture("DeepseekV3ForCausalLMNextN")
class DeepseekV3ForCausalLMNextN(DecoderTree):
    """The layer that drafts tokens, alone (L123). Embedding and head are its target's (`share_with`)."""

    has_experts = True

    def __init__(self, blueprint: Blueprint) -> None:
        ParameterTree.__init__(self)
        self.config, self.place = blueprint.config, blueprint.place
        self.placement = blueprint.expert_placement
        if self.place.pipeline.size > 1:
            raise TopologyError(
                f"{self.config.architecture}, draft role: pp={self.place.pipeline.size}, expected 1 for its one layer",
                model=self.config.architecture,
            )
        self.model = DraftModel(blueprint)
        self.seal(_tables(NameTables(layers=range(0), num_layers=0), blueprint, "draft"))

    def share_with(self, target: ParameterTree) -> None:
        """Take the target's embedding and head: the very same tensors, which are nobody's to load here (L124).

        Args:
            target: The main model on the same rank.

        Raises:
            ConfigError: If it has no embedding or no head, being a stage between others.
        """
        parts = dict(target.named_modules())
        for path in (target.tables.embedding, target.tables.head):
            if path not in parts:
                raise ConfigError(
                    f"draft of {self.config.architecture}: its target has no {path!r} on this rank, expected a rank "
                    "with embedding and head",
                    field=path,
                )
        # Not as modules of this tree, whose shells they would then be.
        object.__setattr__(self.model, "embed_tokens", parts[target.tables.embedding])
        object.__setattr__(self, "lm_head", parts[target.tables.head])


DeepseekV3ForCausalLM.draft = DeepseekV3ForCausalLMNextN
