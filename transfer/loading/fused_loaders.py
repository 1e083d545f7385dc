"""Loaders of fused projections: slot says where in the shell, rank says which piece of the tensor, both at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import torch

from weightwire.transfer.errors import ConfigError, TopologyError
from weightwire.transfer.loading.base_loaders import AxisCuts, CutLoader
from weightwire.transfer.loading.casts import SAME_DTYPE, CastPolicy
from weightwire.transfer.loading.padding import Cut, clipped, equal_share, proportional_parts
from weightwire.transfer.loading.slots import SlotId
from weightwire.transfer.ranks import GroupRank

QkvPart: TypeAlias = Literal["q", "k", "v"]
QKV: tuple[QkvPart, ...] = ("q", "k", "v")

_PADDING_HELPS = ", or padding with heads of zeros (pad_heads, --pad-heads)"


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvGeometry:
    """Which attention heads one rank has.

    With more ranks than key-value heads, neighbouring ranks hold the same one (L101). With `pad_heads`, surplus heads
    are zero, and every query head stays on the rank of its key-value head: a rank takes whole groups of query heads,
    or where several ranks share a key-value head, a piece of its group (L117).

    Attributes:
        num_heads: Query heads of the model.
        num_kv_heads: Key and value heads of the model; divides `num_heads`.
        head_dim: Rows of one query or key head.
        v_head_dim: Rows of one value head.
        group: The attention group, which need not be all of tensor parallelism (L98).
        pad_heads: Whether head counts that the ranks do not divide are padded instead of refused.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    group: GroupRank
    pad_heads: bool = False

    def __post_init__(self) -> None:
        if not self.pad_heads:
            self._check_divisible()
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads}: no multiple of num_key_value_heads {self.num_kv_heads}",
                field="num_key_value_heads",
            )

    def _check_divisible(self) -> None:
        ranks, kv_heads = self.group.size, self.num_kv_heads
        if ranks % kv_heads and kv_heads % ranks:
            raise TopologyError(
                f"attention over {ranks} ranks: {kv_heads} key-value heads, expected a divisor or a multiple of "
                f"{ranks}{_PADDING_HELPS}"
            )
        if self.num_heads % ranks:
            raise TopologyError(
                f"attention over {ranks} ranks: {self.num_heads} heads, expected a multiple of {ranks}{_PADDING_HELPS}"
            )

    @property
    def kv_replicas(self) -> int:
        """Ranks that hold the same key-value head."""
        ranks, kv_heads = self.group.size, self.num_kv_heads
        return ranks // kv_heads if ranks % kv_heads == 0 else 1

    @property
    def local_kv_heads(self) -> int:
        """Key-value heads of each rank, surplus ones included."""
        return -(-self.num_kv_heads * self.kv_replicas // self.group.size)

    @property
    def local_heads(self) -> int:
        """Query heads of each rank, surplus ones included."""
        return -(-self.local_kv_heads * self._heads_per_kv // self.kv_replicas)

    @property
    def rows(self) -> Mapping[QkvPart, int]:
        """Shell rows of each part, in the order of the shell."""
        return {part: self.cut(part).width for part in QKV}

    @property
    def total_rows(self) -> int:
        return sum(self.rows.values())

    @property
    def num_padded_heads(self) -> int:
        """Query heads of all ranks together, surplus ones included."""
        return self.local_heads * self.group.size

    @property
    def _heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    def cut(self, part: QkvPart, *, at: int = 0) -> Cut:
        """Rows of one part: what this rank takes of the global tensor."""
        if part == "q":
            return self._q_cut(self.head_dim, at=at)
        begin, length = self._real_kv_heads()
        dim = self.head_dim if part == "k" else self.v_head_dim
        return Cut(
            at=at,
            width=self.local_kv_heads * dim,
            begin=begin * dim,
            length=length * dim,
            size=self.num_kv_heads * dim,
        )

    def _q_cut(self, dim: int, *, at: int = 0) -> Cut:
        begin, length = self._real_heads()
        return Cut(
            at=at, width=self.local_heads * dim, begin=begin * dim, length=length * dim, size=self.num_heads * dim
        )

    def _real_kv_heads(self) -> tuple[int, int]:
        begin = min(self.group.rank // self.kv_replicas * self.local_kv_heads, self.num_kv_heads)
        return begin, min(self.local_kv_heads, self.num_kv_heads - begin)

    def _real_heads(self) -> tuple[int, int]:
        """Query heads of this rank's key-value heads; if it shares them, its piece of those."""
        kv_begin, kv_length = self._real_kv_heads()
        shared, count = kv_begin * self._heads_per_kv, kv_length * self._heads_per_kv
        inside = min(self.group.rank % self.kv_replicas * self.local_heads, count)
        return shared + inside, min(self.local_heads, count - inside)

    def head_loader(self, part: QkvPart, *, casts: CastPolicy = SAME_DTYPE) -> CutLoader:
        """For what has one row for each row of one part, as a norm over all its heads."""
        return self._cut_loader(self.cut(part), axis=0, casts=casts)

    def o_proj_loader(self, *, casts: CastPolicy = SAME_DTYPE) -> CutLoader:
        """For the output projection, whose columns are the query heads, each of `v_head_dim`; surplus ones are zero."""
        return self._cut_loader(self._q_cut(self.v_head_dim), axis=1, casts=casts)

    def _cut_loader(self, cut: Cut, *, axis: int, casts: CastPolicy) -> CutLoader:
        return CutLoader(
            axis=axis,
            group=self.group,
            width=cut.width,
            offset=cut.begin,
            size=cut.size,
            casts=casts,
            pad=self.pad_heads,
            length=cut.length,
        )

    def fingerprint_facts(self) -> dict[str, str]:
        """What decides the layout besides shape and strides."""
        return {
            "heads": f"{self.local_heads} x {self.group.size} for {self.num_heads}",
            "kv_heads": f"{self.local_kv_heads} x {self.group.size} for {self.num_kv_heads}",
            "attention": f"{self.group.rank}/{self.group.size}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvLoader:
    """Rows of q, then k, then v; weight or bias (L100).

    Attributes:
        geometry: Heads of this rank.
        casts: Dtype changes allowed.
        presharded: Whether tensors come cut already.
    """

    geometry: QkvGeometry
    casts: CastPolicy = SAME_DTYPE
    presharded: bool = False

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return QKV

    @property
    def cuts(self) -> AxisCuts:
        parts, at = list[tuple[SlotId, Cut]](), 0
        for part in QKV:
            parts.append((part, self.geometry.cut(part, at=at)))
            at += parts[-1][1].width
        cuts = AxisCuts(axis=0, parts=tuple(parts))
        return cuts.presharded() if self.presharded else cuts

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """See `ShellLoader.load`; slot None is a checkpoint that holds `[q | k | v]` as one tensor."""
        return self.cuts.load(shell, tensor, slot, name=name, casts=self.casts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedLoader:
    """Column-parallel parts one behind the other, as gate and up (L102); weight or bias.

    Attributes:
        sizes: Global size of each part as the shells have it, padding included.
        group: The group over which each part is split.
        casts: Dtype changes allowed.
        real_sizes: Global sizes in the checkpoint, where parts are padded; each part's surplus is zero.
        presharded: Whether tensors come cut already.
    """

    sizes: tuple[int, ...]
    group: GroupRank
    casts: CastPolicy = SAME_DTYPE
    real_sizes: tuple[int, ...] | None = None
    presharded: bool = False

    def __post_init__(self) -> None:
        for size in self.sizes:
            equal_share(size, self.group.size, of=f"parts {list(self.sizes)}")
        real = self.real_sizes or self.sizes
        if len(real) != len(self.sizes) or any(size > padded for size, padded in zip(real, self.sizes, strict=True)):
            raise TopologyError(f"parts {list(self.sizes)}: real sizes {list(real)} do not lie inside of them")

    @classmethod
    def proportional(
        cls, sizes: tuple[int, ...], rows: int, *, group: GroupRank, casts: CastPolicy = SAME_DTYPE
    ) -> Self:
        """Parts padded in proportion: the checkpoint has only `rows` rows for all of them (L116).

        Raises:
            TopologyError: If the rows do not split in these proportions, or a part over the ranks.
        """
        return cls(sizes=sizes, group=group, casts=casts, real_sizes=proportional_parts(sizes, rows))

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return tuple(range(len(self.sizes)))

    @property
    def cuts(self) -> AxisCuts:
        parts, at = list[tuple[SlotId, Cut]](), 0
        for slot, (padded, real) in enumerate(zip(self.sizes, self.real_sizes or self.sizes, strict=True)):
            width = padded // self.group.size
            parts.append((slot, clipped(self.group.rank * width, width, size=real, at=at)))
            at += width
        cuts = AxisCuts(axis=0, parts=tuple(parts))
        return cuts.presharded() if self.presharded else cuts

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """See `ShellLoader.load`; slot None is a checkpoint that holds all parts as one tensor."""
        return self.cuts.load(shell, tensor, slot, name=name, casts=self.casts)
