"""What a tree is built from: the model, this rank's place in a topology, and what the caller chose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import torch

from weightwire.transfer.errors import ConfigError, TopologyError
from weightwire.transfer.loading.base_loaders import CutLoader
from weightwire.transfer.loading.casts import SAME_DTYPE, CastPolicy, dtype_name, float_casts
from weightwire.transfer.loading.expert_loaders import ExpertLoader, Partition, padded_width
from weightwire.transfer.loading.fused_loaders import QkvGeometry
from weightwire.transfer.loading.mappers import WeightsMapper
from weightwire.transfer.loading.vocabulary import VocabLoader, padded_vocab
from weightwire.transfer.models.config import ExpertConfig, ModelConfig
from weightwire.transfer.models.latent_config import LatentConfig
from weightwire.transfer.ranks import ExpertPlacement, RankPlace, stage_layers

Role: TypeAlias = Literal["main", "draft"]

# Rows of the vocabulary come in multiples of so many for each tensor-parallel rank.
_VOCAB_MULTIPLE = 64
_CASTABLE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What neither the model nor the topology decides.

    Attributes:
        device: Where the shells lie; `meta` allocates nothing.
        dtype: Of every parameter that nothing else decides; None for the model's own.
        vocab_multiple: Rows of the vocabulary are padded to a multiple of it; None for 64 x tp.
        pad_heads: Whether head counts that tp does not divide are padded instead of refused.
        expert_map: For each expert-parallel rank the logical expert of each slot; None for equal blocks.
        expert_multiple: Each rank's part of an expert's intermediate size is padded to a multiple of it.
        expert_partition: With padding, where a rank's part begins; see `ExpertLoader`.
        w13_up_first: Whether the kernel wants the up half of `w13` before the gate half.
        kv_scales: Whether there are shells for scales of the KV cache. They begin as 1, and may stay so.
        separate_head: Whether a tied head has a shell of its own although the embedding lies on the same rank.
        fuse_shared_expert: Whether the shared expert is one more expert of the grouped shells instead of an MLP.
        role: Whether the shells are those of the model, or of the layer behind its last one that drafts tokens.
    """

    device: torch.device | str = "cpu"
    dtype: torch.dtype | None = None
    vocab_multiple: int | None = None
    pad_heads: bool = False
    expert_map: Sequence[Sequence[int]] | None = None
    expert_multiple: int = 1
    expert_partition: Partition = "even"
    w13_up_first: bool = False
    kv_scales: bool = False
    separate_head: bool = False
    fuse_shared_expert: bool = False
    role: Role = "main"


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """All that decides the shells of one rank.

    Attributes:
        config: The model.
        place: The rank.
        options: The caller's choice.
        renames: Of the architecture and the quantisation; shells of scales are named by them, too (L52).
    """

    config: ModelConfig
    place: RankPlace
    options: BuildOptions
    renames: WeightsMapper = field(default_factory=WeightsMapper)

    @property
    def dtype(self) -> torch.dtype:
        return self.options.dtype or self.config.dtype

    @cached_property
    def casts(self) -> CastPolicy:
        """What shells of the model's dtype accept."""
        return float_casts(dtype_name(self.dtype)) if self.dtype in _CASTABLE else SAME_DTYPE

    @cached_property
    def layers(self) -> range:
        """Numbers of this stage's layers."""
        with self.naming("layers"):
            return stage_layers(self.config.num_layers, self.place.pipeline)

    @property
    def is_first_stage(self) -> bool:
        return self.place.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.place.pipeline.rank == self.place.pipeline.size - 1

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Errors about the topology name the model and the rank, too.

        Args:
            what: The part of the model that is being laid out.
        """
        try:
            yield
        except TopologyError as error:
            raise TopologyError(
                f"{self.config.architecture}, rank {self.place.rank}, {what}: {error}",
                **{**error.facts, "model": self.config.architecture, "rank": self.place.rank},
            ) from error

    def heads(self) -> QkvGeometry:
        """The attention heads of this rank."""
        return QkvGeometry(
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            v_head_dim=self.config.latent.v if self.config.latent else self.config.head_dim,
            group=self.place.tensor,
            pad_heads=self.options.pad_heads,
        )

    @property
    def latent(self) -> LatentConfig:
        """Raises:
        ConfigError: If the model's attention is of another kind.
        """
        if self.config.latent is None:
            raise ConfigError(
                f"config.json: field 'kv_lora_rank' is missing, expected it for {self.config.architecture}",
                field="kv_lora_rank",
            )
        return self.config.latent

    def vocabulary(self) -> VocabLoader:
        """The rows of embedding and head."""
        multiple = self.options.vocab_multiple or _VOCAB_MULTIPLE * self.place.tensor.size
        padded = padded_vocab(self.config.vocab_size, multiple)
        return VocabLoader(vocab=self.config.vocab_size, padded=padded, group=self.place.tensor, casts=self.casts)

    def columns(self, size: int, casts: CastPolicy) -> CutLoader:
        """This rank's outputs of a column-parallel layer."""
        return CutLoader.column(self.place.tensor, size, casts=casts)

    def rows(self, size: int, casts: CastPolicy) -> CutLoader:
        """This rank's inputs of a row-parallel layer."""
        return CutLoader.row(self.place.tensor, size, casts=casts)

    @property
    def experts(self) -> ExpertConfig:
        """Raises:
        ConfigError: If the model has none.
        """
        if self.config.experts is None:
            raise ConfigError(
                f"config.json: field 'num_experts' is missing, expected it for {self.config.architecture}",
                field="num_experts",
            )
        return self.config.experts

    @cached_property
    def expert_placement(self) -> ExpertPlacement | None:
        """Which expert lies where; None for a dense model."""
        if self.config.experts is None:
            return None
        count, ep = self.config.experts.num_experts, self.place.expert.size
        with self.naming("experts"):
            if self.options.expert_map is None:
                return ExpertPlacement.equal(count, ep).with_shared(self.num_fused_shared)
            if len(self.options.expert_map) != ep:
                raise TopologyError(f"expert map: made for {len(self.options.expert_map)} ranks, expected ep={ep}")
            return ExpertPlacement.from_map(count, self.options.expert_map).with_shared(self.num_fused_shared)

    @property
    def num_fused_shared(self) -> int:
        """Shared experts that pose as routed ones.

        Raises:
            ConfigError: If the model has none of a routed expert's size, or several (L87, L120).
        """
        if not self.options.fuse_shared_expert:
            return 0
        if self.experts.num_shared != 1:
            raise ConfigError(
                f"config.json: field 'n_shared_experts' is {self.experts.num_shared}, expected 1 for a shared expert "
                "that poses as a routed one (fuse_shared_expert)",
                field="n_shared_experts",
            )
        return 1

    def expert_loader(self, casts: CastPolicy) -> ExpertLoader:
        """For `w13`; that of `w2` comes from it, so that both are cut by one rule."""
        size, group = self.experts.intermediate_size, self.place.expert_tensor
        placement = self.expert_placement
        assert placement is not None
        return ExpertLoader(
            matrix="w13",
            placement=placement,
            expert=self.place.expert,
            tensor=group,
            intermediate=size,
            width=padded_width(size, group, multiple=self.options.expert_multiple),
            up_first=self.options.w13_up_first,
            partition=self.options.expert_partition,
            casts=casts,
        )

    def runtime_leaf(self, leaf: str) -> str:
        """The name that a shell gets for a tensor whose checkpoint name ends in `leaf`."""
        renamed = self.renames.apply(f"module.{leaf}")
        return leaf if renamed is None else renamed.rpartition(".")[2]
