"""Where one global rank stands in a topology, and which layers and experts are its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from weightwire.transfer.errors import TopologyError
from weightwire.transfer.manifest import Topology


@dataclass(frozen=True, slots=True)
class GroupRank:
    """A position in one parallel group (tensor parallel, attention, experts)."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise TopologyError(f"rank {self.rank}: not in a group of {self.size}")


ALONE = GroupRank()
# Of one rank. Each is filled by itself; published models have fewer than 1,000 experts.
_MOST_SLOTS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The groups that one global rank is in.

    `global rank = pp_rank x tp + tp_rank`. The tp ranks of a stage are cut into `ep` blocks of neighbours; each block
    holds its own experts, and inside a block each expert's intermediate dimension is sliced over `tp / ep` ranks.

    Attributes:
        rank: Global rank.
        tensor: Tensor parallel group of the stage.
        pipeline: The stages.
        expert: Which block of experts.
        expert_tensor: Place inside the block.
    """

    rank: int
    tensor: GroupRank
    pipeline: GroupRank
    expert: GroupRank
    expert_tensor: GroupRank

    @classmethod
    def of(cls, topology: Topology, rank: int) -> Self:
        """Raises:
        TopologyError: If there is no such rank.
        """
        if not 0 <= rank < topology.world_size:
            raise TopologyError(f"rank {rank}: not one of the {topology.world_size} ranks of {topology}")
        pp_rank, tp_rank = divmod(rank, topology.tp)
        block = topology.tp // topology.ep
        return cls(
            rank=rank,
            tensor=GroupRank(tp_rank, topology.tp),
            pipeline=GroupRank(pp_rank, topology.pp),
            expert=GroupRank(tp_rank // block, topology.ep),
            expert_tensor=GroupRank(tp_rank % block, block),
        )


def stage_layers(num_layers: int, pipeline: GroupRank) -> range:
    """Layers of one pipeline stage: contiguous blocks, the remainder to the first stages.

    Raises:
        TopologyError: If there are more stages than layers.
    """
    if pipeline.size > num_layers:
        raise TopologyError(f"pp={pipeline.size}: more stages than the model's {num_layers} layers")
    each, left = divmod(num_layers, pipeline.size)
    begin = pipeline.rank * each + min(pipeline.rank, left)
    return range(begin, begin + each + (pipeline.rank < left))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """Which expert lies in which physical slot of which expert-parallel rank.

    Attributes:
        num_experts: Logical experts, as the checkpoint numbers them.
        ranks: For each expert-parallel rank the logical expert of each of its slots, in order. A logical expert may
            lie in several slots (replicas), on one rank or on several.
        num_shared: How many of the logical experts, the last ones, are shared ones that pose as routed. A tensor that
            holds all experts at once does not hold them.
    """

    num_experts: int
    ranks: tuple[tuple[int, ...], ...]
    num_shared: int = 0
    # The inverse of `ranks`: looked up for each tensor of each expert.
    _slots: tuple[Mapping[int, tuple[int, ...]], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_slots", tuple(map(_inverse, self.ranks)))
        placed = {expert for slots in self._slots for expert in slots}
        strange = sorted(placed - set(range(self.num_experts)))
        missing = sorted(set(range(self.num_experts)) - placed)
        if strange or missing or not self.ranks:
            raise TopologyError(
                f"expert map: of {self.num_experts} experts {missing[:20]} have no slot, "
                f"and {strange[:20]} are not among them"
            )

    @classmethod
    def equal(cls, num_experts: int, ep: int) -> Self:
        """Contiguous blocks of equal size.

        Raises:
            TopologyError: If the experts cannot be dealt evenly; an expert map could.
        """
        if num_experts % ep:
            raise TopologyError(
                f"ep={ep}: does not divide the model's {num_experts} experts; an expert map could deal them unevenly"
            )
        each = num_experts // ep
        return cls(num_experts=num_experts, ranks=tuple(tuple(range(i * each, (i + 1) * each)) for i in range(ep)))

    @classmethod
    def from_map(cls, num_experts: int, ranks: Sequence[Sequence[int]]) -> Self:
        """An explicit map; see `ranks`.

        Raises:
            TopologyError: If an expert has no slot, a slot an unknown expert, or a rank more slots than can be meant.
        """
        most = max(map(len, ranks), default=0)
        if most > _MOST_SLOTS:
            raise TopologyError(f"expert map: has {most} slots on one rank, expected at most {_MOST_SLOTS}")
        return cls(num_experts=num_experts, ranks=tuple(tuple(slots) for slots in ranks))

    def with_shared(self, count: int) -> Self:
        """The same with shared experts behind the routed ones, of which every rank has all (L120, L121)."""
        added = tuple(range(self.num_experts, self.num_experts + count))
        ranks = tuple((*slots, *added) for slots in self.ranks)
        return type(self)(num_experts=self.num_experts + count, ranks=ranks, num_shared=self.num_shared + count)

    @property
    def num_routed(self) -> int:
        """Logical experts that a router chooses among."""
        return self.num_experts - self.num_shared

    def local_slots(self, expert: int, ep_rank: int) -> tuple[int, ...]:
        """Indices in the shells of one rank at which a logical expert lies; empty if it is not local."""
        return self._slots[ep_rank].get(expert, ())

    def num_local(self, ep_rank: int) -> int:
        """Expert slots of one rank."""
        return len(self.ranks[ep_rank])


def _inverse(slots: Iterable[int]) -> dict[int, tuple[int, ...]]:
    found = dict[int, list[int]]()
    for index, expert in enumerate(slots):
        found.setdefault(expert, []).append(index)
    return {expert: tuple(indices) for expert, indices in found.items()}
