"""Multi-head latent attention: first down to vectors that all heads share, then up to each head."""

from __future__ import annotations

import torch

from weightwire.transfer.loading.base_loaders import CutLoader, WholeLoader
from weightwire.transfer.loading.casts import SAME_DTYPE, CastPolicy, float_casts
from weightwire.transfer.loading.fused_loaders import MergedLoader, QkvGeometry
from weightwire.transfer.loading.halves import HalvesLoader
from weightwire.transfer.models.blueprint import Blueprint
from weightwire.transfer.models.config import Fp8Config
from weightwire.transfer.models.latent_config import IndexerConfig
from weightwire.transfer.models.layers import (
    AttentionOutputLinear,
    KvScales,
    Layer,
    Linear,
    LinearShape,
    ReplicatedLinear,
    RMSNorm,
)
from weightwire.transfer.models.self_loading import StackedBlock
from weightwire.transfer.ranks import ALONE

_NORM_CASTS = float_casts("float32")


class LatentDownLinear(Linear):
    """Rows of the queries' latent vector, then of that of keys and values; whole on every rank (L130).

    A checkpoint has them as two tensors. Each is a slot of its own, so that neither has to wait for the other.
    """

    def __init__(self, blueprint: Blueprint, path: str, *, q_rank: int, bias: bool) -> None:
        sizes = (q_rank, blueprint.latent.kv_outputs)

        def loader(casts: CastPolicy) -> MergedLoader:
            return MergedLoader(sizes=sizes, group=ALONE, casts=casts)

        shape = LinearShape(
            path=path,
            parts=("q_a_proj", "kv_a_proj_with_mqa"),
            rows=sum(sizes),
            cols=blueprint.config.hidden_size,
            loader=loader,
            bias=loader if bias else None,
        )
        super().__init__(blueprint, shape)


class HeadsLinear(Linear):
    """Outputs split by heads: rows of this rank's heads, each `head_dim` of them (L136)."""

    def __init__(self, blueprint: Blueprint, path: str, *, inputs: int, head_dim: int) -> None:
        with blueprint.naming(path):
            heads = QkvGeometry(
                num_heads=blueprint.config.num_heads,
                num_kv_heads=blueprint.config.num_heads,
                head_dim=head_dim,
                v_head_dim=head_dim,
                group=blueprint.place.tensor,
                pad_heads=blueprint.options.pad_heads,
            )

            def loader(casts: CastPolicy) -> CutLoader:
                return heads.head_loader("q", casts=casts)

            shape = LinearShape(
                path=path,
                parts=(path.rpartition(".")[2],),
                rows=loader(SAME_DTYPE).width,
                cols=inputs,
                loader=loader,
            )
            super().__init__(blueprint, shape)


class LayerNorm(Layer):
    """`weight [size]` and `bias [size]`, float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            self.add(name, (size,), WholeLoader(casts=_NORM_CASTS), dtype=torch.float32)


class IndexerDownLinear(Layer):
    """Rows of `wk`, then of `weights_proj`, bfloat16 even where `wk` comes as FP8 (L127)."""

    def __init__(self, blueprint: Blueprint, path: str, indexer: IndexerConfig) -> None:
        super().__init__()
        fp8, hidden = blueprint.config.fp8, blueprint.config.hidden_size
        loader = HalvesLoader(
            parts=(("wk", indexer.head_dim), ("weights_proj", indexer.num_heads)),
            quantised=("wk",) if _in_blocks(fp8, path) else (),
            cols=hidden,
            block=fp8.block if fp8 is not None and fp8.block is not None else (128, 128),
            casts=blueprint.casts,
        )
        self.add("weight", (loader.rows, hidden), loader)


def _in_blocks(fp8: Fp8Config | None, path: str) -> bool:
    return fp8 is not None and fp8.block is not None and fp8.converts(path, ("wk",))


class Indexer(StackedBlock):
    """What picks the tokens that sparse attention looks at; whole on every rank."""

    def __init__(self, blueprint: Blueprint, path: str, indexer: IndexerConfig, *, q_rank: int) -> None:
        super().__init__()
        hidden = blueprint.config.hidden_size
        self.wq_b = ReplicatedLinear(
            blueprint, f"{path}.wq_b", inputs=q_rank, outputs=indexer.num_heads * indexer.head_dim, quantised=True
        )
        if blueprint.dtype == torch.bfloat16:
            self.wk_weights_proj = IndexerDownLinear(blueprint, path, indexer)
        else:
            self.wk = ReplicatedLinear(blueprint, f"{path}.wk", inputs=hidden, outputs=indexer.head_dim, quantised=True)
            self.weights_proj = ReplicatedLinear(
                blueprint, f"{path}.weights_proj", inputs=hidden, outputs=indexer.num_heads
            )
        self.k_norm = LayerNorm(indexer.head_dim)


class LatentAttention(StackedBlock):
    """Down to what heads share, whole on every rank; up to this rank's heads; and the output projection."""

    def __init__(self, blueprint: Blueprint, path: str) -> None:
        super().__init__()
        config, latent = blueprint.config, blueprint.latent
        hidden, bias = config.hidden_size, bool(config.attention_bias)
        if latent.q_rank is None:
            self.q_proj = HeadsLinear(blueprint, f"{path}.q_proj", inputs=hidden, head_dim=latent.qk_head_dim)
            self.kv_a_proj_with_mqa = ReplicatedLinear(
                blueprint,
                f"{path}.kv_a_proj_with_mqa",
                inputs=hidden,
                outputs=latent.kv_outputs,
                bias=bias,
                quantised=True,
            )
        else:
            self.fused_qkv_a_proj_with_mqa = LatentDownLinear(
                blueprint, f"{path}.fused_qkv_a_proj_with_mqa", q_rank=latent.q_rank, bias=bias
            )
            self.q_a_layernorm = RMSNorm(blueprint, latent.q_rank)
            self.q_b_proj = HeadsLinear(
                blueprint, f"{path}.q_b_proj", inputs=latent.q_rank, head_dim=latent.qk_head_dim
            )
        self.kv_a_layernorm = RMSNorm(blueprint, latent.kv_rank)
        self.kv_b_proj = HeadsLinear(blueprint, f"{path}.kv_b_proj", inputs=latent.kv_rank, head_dim=latent.kv_head_dim)
        self.o_proj = AttentionOutputLinear(blueprint, f"{path}.o_proj", bias=bias)
        if config.indexer is not None and latent.q_rank is not None:
            self.indexer = Indexer(blueprint, f"{path}.indexer", config.indexer, q_rank=latent.q_rank)
        if blueprint.options.kv_scales:
            self.attn_mqa = KvScales()
