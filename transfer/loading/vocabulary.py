"""Loaders of embedding and output head, whose shells are padded in rows (L118)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightwire.transfer.errors import TopologyError
from weightwire.transfer.loading.base_loaders import AxisCuts
from weightwire.transfer.loading.casts import SAME_DTYPE, CastPolicy
from weightwire.transfer.loading.padding import clipped, equal_share, round_up
from weightwire.transfer.loading.slots import SlotId
from weightwire.transfer.ranks import GroupRank


def padded_vocab(vocab: int, multiple: int) -> int:
    """Rows of all shells together.

    Raises:
        ValueError: If `multiple` is not positive.
    """
    if multiple < 1:
        raise ValueError(f"vocabulary multiple is {multiple}, expected at least 1")
    return round_up(vocab, multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabLoader:
    """A rank's rows of the vocabulary, zeros beyond its end; weight or bias.

    Attributes:
        vocab: Rows of the model's own vocabulary.
        padded: Rows of all ranks' shells together; the ranks divide it.
        group: The group over which the rows are split.
        casts: Dtype changes allowed.
        accept_padded: Whether a tensor of `padded` rows may come, as trainers push it; its padding is not copied.
    """

    vocab: int
    padded: int
    group: GroupRank
    casts: CastPolicy = SAME_DTYPE
    accept_padded: bool = False

    def __post_init__(self) -> None:
        equal_share(self.padded, self.group.size, of="padded vocabulary")
        if self.padded < self.vocab:
            raise TopologyError(f"padded vocabulary: {self.padded} rows do not hold a vocabulary of {self.vocab}")

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return (None,)

    @property
    def rows(self) -> int:
        """Rows of each rank's shell."""
        return self.padded // self.group.size

    @property
    def cuts(self) -> AxisCuts:
        cut = clipped(self.group.rank * self.rows, self.rows, size=self.vocab)
        return AxisCuts(axis=0, parts=((None, cut),))

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """See `ShellLoader.load`."""
        if self.accept_padded and tensor.dim() and tensor.shape[0] == self.padded:
            tensor = tensor.narrow(0, 0, self.vocab)
        return self.cuts.load(shell, tensor, slot, name=name, casts=self.casts)

    def fingerprint_facts(self) -> dict[str, str]:
        """What decides the layout besides shape and strides."""
        return {"vocab": f"{self.group.rank}/{self.group.size} of {self.vocab} padded to {self.padded}"}
