"""Loaders of grouped expert shells: first which experts lie here, then which slice of each (L106)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from weightwire.transfer.errors import PlacementError, TopologyError
from weightwire.transfer.loading.base_loaders import AxisCuts, Write, misfit, no_such_slot, write_all
from weightwire.transfer.loading.casts import SAME_DTYPE, CastPolicy
from weightwire.transfer.loading.padding import Cut, clipped, round_up
from weightwire.transfer.loading.slots import ExpertPart, ExpertPartName, SlotId
from weightwire.transfer.ranks import ExpertPlacement, GroupRank

ExpertMatrix: TypeAlias = Literal["w13", "w2"]
Partition: TypeAlias = Literal["stride", "even"]


def needs_padded_load(*, is_cpu: bool, is_trtllm: bool, is_aiter_padded: bool) -> bool:
    """Whether expert shells are wider than the tensors' slices (L109).

    Args:
        is_cpu: The CPU path.
        is_trtllm: A FlashInfer TRT-LLM backend for experts.
        is_aiter_padded: A shell that AITER padded.
    """
    return is_cpu or is_trtllm or is_aiter_padded


def padding_multiple(*, is_gated_nvfp4: bool) -> int:
    """To what a TRT-LLM backend wants the local intermediate size padded (L109)."""
    return 64 if is_gated_nvfp4 else 128


def padded_width(intermediate: int, tensor: GroupRank, *, multiple: int = 1) -> int:
    """Local width of one expert's intermediate axis, the same on every rank."""
    return round_up(-(-intermediate // tensor.size), multiple)


def parts_of(matrix: ExpertMatrix, *, gated: bool) -> tuple[ExpertPartName, ...]:
    """The checkpoint matrices in one shell, in logical order."""
    if matrix == "w2":
        return ("w2",)
    return ("w1", "w3") if gated else ("w1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlots:
    """Which logical expert lies at which index of this rank's shells.

    Attributes:
        placement: Of all ranks.
        expert: The expert-parallel group.
        everywhere: Whether the shell holds all experts, indexed by their logical numbers, on every rank (L63).
    """

    placement: ExpertPlacement
    expert: GroupRank
    everywhere: bool = False

    def __post_init__(self) -> None:
        if len(self.placement.ranks) != self.expert.size:
            raise TopologyError(
                f"expert map: made for {len(self.placement.ranks)} ranks, the expert group has {self.expert.size}"
            )

    @property
    def logical(self) -> tuple[int, ...]:
        """The logical expert of each index of the shell."""
        return tuple(range(self.placement.num_experts)) if self.everywhere else self.placement.ranks[self.expert.rank]

    @property
    def routed(self) -> tuple[int, ...]:
        """Indices of the shell that hold no shared expert."""
        count = self.placement.num_routed
        return tuple(index for index, logical in enumerate(self.logical) if logical < count)

    def slots(self, parts: Iterable[ExpertPartName]) -> tuple[SlotId, ...]:
        """One for each index and part."""
        listed = tuple(parts)
        return tuple(ExpertPart(index, part) for index in range(len(self.logical)) for part in listed)

    def routed_slots(self, parts: Iterable[ExpertPartName]) -> tuple[SlotId, ...]:
        """Those that a tensor of all experts fills."""
        listed = tuple(parts)
        return tuple(ExpertPart(index, part) for index in self.routed for part in listed)

    def indices(self, expert: int, *, name: str) -> tuple[int, ...]:
        """Where a logical expert lies here, replicas included (L64); empty if it belongs to other ranks.

        Raises:
            PlacementError: If the model has no such expert.
        """
        if not 0 <= expert < self.placement.num_experts:
            raise PlacementError(
                f"tensor {name!r}: expert {expert} is none of the model's {self.placement.num_experts}", tensor=name
            )
        if self.everywhere:
            return (expert,)
        return self.placement.local_slots(expert, self.expert.rank)

    def check_shell(self, shell: torch.Tensor, tensor: torch.Tensor, *, name: str) -> None:
        """Raises:
        PlacementError: If the shell has not one row for each expert slot of this rank.
        """
        if not shell.dim() or shell.shape[0] != len(self.logical):
            raise misfit(name, tensor, shell, hint=f"the parameter was planned for {len(self.logical)} expert slots")

    def pairs(self, tensor: torch.Tensor, shell: torch.Tensor, *, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Of a checkpoint tensor that fuses all experts: each index of the shell with its expert's piece.

        Raises:
            PlacementError: If the tensor's first axis does not count the model's routed experts.
        """
        count = self.placement.num_routed
        if not tensor.dim() or tensor.shape[0] != count:
            hint = f"axis 0 of the weight is expected to count {count} experts"
            raise misfit(name, tensor, shell, hint=hint)
        for index in self.routed:
            yield index, tensor[self.logical[index]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoader:
    """Slices of expert matrices in one grouped shell, weights or biases, padding zeroed.

    Shells are `[slots, parts x width, hidden]` for w13 and `[slots, hidden, width]` for w2 (L60), with the last two
    axes swapped where `transposed`; w13 biases `[slots, parts x width]`; w2 biases `[slots, hidden]`, never cut. The
    loaders of w13, w2 and their scales come from one value (`for_matrix`), so that a layer has one partition rule.

    Attributes:
        matrix: `w13` (gate and up) or `w2` (down).
        placement: Which expert lies where.
        expert: The expert-parallel group.
        tensor: The group over which each expert's intermediate axis is split.
        intermediate: Size of that axis in the checkpoint.
        width: Size of that axis in a rank's shell, padding included.
        gated: Whether w13 has an up half; w1 alone takes all of it otherwise (L107).
        up_first: Whether the kernel wants up in the first half (`load_up_proj_weight_first`, L108).
        partition: With padding, where rank r begins: `stride` at `r x width`, `even` at `r x intermediate / ranks`.
        transposed: Whether the kernel stores weights `[in, out]`; biases stay (L112).
        presharded: Whether tensors come cut and laid out for this rank: no second cut or transpose (L113).
        casts: Dtype changes allowed.
    """

    matrix: ExpertMatrix
    placement: ExpertPlacement
    expert: GroupRank
    tensor: GroupRank
    intermediate: int
    width: int
    gated: bool = True
    up_first: bool = False
    partition: Partition = "even"
    transposed: bool = False
    presharded: bool = False
    casts: CastPolicy = SAME_DTYPE

    def __post_init__(self) -> None:
        ExpertSlots(placement=self.placement, expert=self.expert)
        ranks, size = self.tensor.size, self.intermediate
        if self.partition == "even" and size % ranks:
            raise TopologyError(
                f"expert intermediate size {size}: {ranks} ranks do not divide it, expected the stride partition"
            )
        if self.width * ranks < size:
            raise TopologyError(f"expert intermediate size {size}: {ranks} shells of {self.width} do not hold it")

    def for_matrix(self, matrix: ExpertMatrix) -> ExpertLoader:
        """The loader of the layer's other shell, by the same rules (L110)."""
        return replace(self, matrix=matrix)

    @property
    def parts(self) -> tuple[ExpertPartName, ...]:
        return parts_of(self.matrix, gated=self.gated)

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return self._experts.slots(self.parts)

    @property
    def num_slots(self) -> int:
        """Expert slots of this rank's shells."""
        return len(self._experts.logical)

    def shell_shape(self, hidden: int) -> tuple[int, int, int]:
        """Shape of the weight's shell."""
        cut = len(self.parts) * self.width
        first = (self.matrix == "w13") != self.transposed
        return (self.num_slots, cut, hidden) if first else (self.num_slots, hidden, cut)

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """See `ShellLoader.load`.

        Args:
            shell: The grouped shell.
            tensor: One expert's matrix or bias, or with slot None those of all experts: `[E, 2I, H]` with gate first,
                `[E, H, I]`; whatever the shell's order.
            slot: Logical expert and part.
            name: Runtime name of the shell.
        """
        self._experts.check_shell(shell, tensor, name=name)
        if slot is None:
            writes = list(self._fused_writes(shell, tensor, name=name))
            write_all(writes, name=name, casts=self.casts)
            return self._experts.routed_slots(self.parts)
        if not isinstance(slot, ExpertPart) or slot.part not in self.parts:
            raise no_such_slot(name, slot, self.parts)
        indices = self._experts.indices(slot.expert, name=name)
        writes = [write for index in indices for write in self._writes(shell[index], tensor, slot.part, name=name)]
        write_all(writes, name=name, casts=self.casts)
        return tuple(ExpertPart(index, slot.part) for index in indices)

    def _fused_writes(self, shell: torch.Tensor, tensor: torch.Tensor, *, name: str) -> Iterator[Write]:
        for index, piece in self._experts.pairs(tensor, shell, name=name):
            yield from self._writes(shell[index], piece, None, name=name)

    def _writes(self, shell: torch.Tensor, tensor: torch.Tensor, part: SlotId, *, name: str) -> list[Write]:
        """Of one expert; `shell` and `tensor` are matrices, or vectors for biases."""
        if shell.dim() == 1:
            return (
                [Write(shell, tensor)] if self.matrix == "w2" else self._cuts(0).writes(shell, tensor, part, name=name)
            )
        axis = 0 if self.matrix == "w13" else 1
        if self.presharded:
            axis = 1 - axis if self.transposed else axis
            return self._cuts(axis).presharded().writes(shell, tensor, part, name=name)
        # Seen through the transpose, such a shell is as checkpoints have it.
        view = shell.transpose(0, 1) if self.transposed else shell
        return self._cuts(axis).writes(view, tensor, part, name=name)

    def _cuts(self, axis: int) -> AxisCuts:
        begins = {part: number * self.width for number, part in enumerate(self._kernel_order)}
        return AxisCuts(axis=axis, parts=tuple((part, self._cut(begins[part])) for part in self.parts))

    def _cut(self, at: int) -> Cut:
        if self.partition == "stride":
            return clipped(self.tensor.rank * self.width, self.width, size=self.intermediate, at=at)
        each = self.intermediate // self.tensor.size
        return Cut(at=at, width=self.width, begin=self.tensor.rank * each, length=each, size=self.intermediate)

    @property
    def _kernel_order(self) -> tuple[ExpertPartName, ...]:
        return self.parts[::-1] if self.up_first else self.parts

    @property
    def _experts(self) -> ExpertSlots:
        return ExpertSlots(placement=self.placement, expert=self.expert)

    def fingerprint_facts(self) -> dict[str, str]:
        """What decides the layout besides shape and strides (L108, L183)."""
        is_padded = self.width * self.tensor.size != self.intermediate
        return {
            "experts": ",".join(map(str, self._experts.logical)),
            "expert_axis": f"{self.tensor.rank}/{self.tensor.size} of {self.intermediate}, width {self.width}",
            # Without padding both rules are the same one.
            "partition": self.partition if is_padded else "exact",
            "order": ",".join(self._kernel_order),
            "transposed": str(self.transposed),
        }


def check_one_rule(loaders: Iterable[ExpertLoader], *, layer: str) -> None:
    """Refuse a layer whose shells are cut by different rules: right shapes, wrong sums (L110).

    Raises:
        TopologyError: Naming the layer and the rules.
    """
    rules = {(loader.partition, loader.width, loader.intermediate, loader.tensor) for loader in loaders}
    if len(rules) > 1:
        listed = sorted(f"{rule} width {width} of {size}" for rule, width, size, _ in rules)
        raise TopologyError(
            f"layer {layer!r}: its expert shells have {len(rules)} partition rules {listed}, expected one"
        )
