"""Attention by a latent vector that all heads share, and the indexer that picks what it attends to."""

from __future__ import annotations

from dataclasses import dataclass

from weightwire.transfer.models.config_fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention.

    Attributes:
        q_rank: Width of the queries' latent vector; None where queries are projected directly.
        kv_rank: Width of the latent vector of keys and values.
        qk_nope: Width of the part of a head's query and key that has no position.
        qk_rope: Of the part that has one, which all heads share.
        v: Width of a head's value.
    """

    q_rank: int | None
    kv_rank: int
    qk_nope: int
    qk_rope: int
    v: int

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query."""
        return self.qk_nope + self.qk_rope

    @property
    def kv_head_dim(self) -> int:
        """Rows of one head in `kv_b_proj`: of its key, then of its value (L136)."""
        return self.qk_nope + self.v

    @property
    def kv_outputs(self) -> int:
        """Rows of `kv_a_proj_with_mqa`."""
        return self.kv_rank + self.qk_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """The indexer of sparse attention.

    Attributes:
        num_heads: Its heads.
        head_dim: Width of each.
    """

    num_heads: int
    head_dim: int


def latent_of(fields: Fields) -> LatentConfig | None:
    """None for a model of another kind of attention.

    Raises:
        ConfigError: If only some of the sizes are there.
    """
    kv_rank = fields.optional_size("kv_lora_rank")
    if kv_rank is None:
        return None
    return LatentConfig(
        q_rank=fields.optional_size("q_lora_rank"),
        kv_rank=kv_rank,
        qk_nope=fields.size("qk_nope_head_dim"),
        qk_rope=fields.size("qk_rope_head_dim"),
        v=fields.size("v_head_dim"),
    )


def indexer_of(fields: Fields) -> IndexerConfig | None:
    """None for a model that attends to everything.

    Raises:
        ConfigError: If only one of the sizes is there.
    """
    heads = fields.optional_size("index_n_heads")
    return None if heads is None else IndexerConfig(num_heads=heads, head_dim=fields.size("index_head_dim"))
