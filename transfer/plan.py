"""What a plan is: which bytes of a target rank come from which source, which from disk, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weightwire.transfer.regions import Region

Way = Literal["identical", "reshard", "disk", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """`target <- source`: flat regions in bytes, of equal `numel`, element for element in row-major order."""

    source: Region
    target: Region

    @property
    def nbytes(self) -> int:
        return self.target.numel

    @property
    def is_contiguous(self) -> bool:
        return self.source.is_contiguous and self.target.is_contiguous


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPiece:
    """Checkpoint elements that no source gives: `runtime <- checkpoint`, in the same order.

    Attributes:
        tensor: Runtime name.
        name: Checkpoint name; None where it is not known what belongs there.
        checkpoint: Elements of the row-major checkpoint tensor.
        runtime: Elements of the storage that the runtime tensor lies in.
    """

    tensor: str
    name: str | None
    checkpoint: Region
    runtime: Region

    def __str__(self) -> str:
        return self.tensor if self.name in (None, self.tensor) else f"{self.tensor}[{self.name}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorWay:
    """How one target tensor is filled, and why so.

    Attributes:
        way: The best description; a tensor with any piece from disk is `disk`.
        nbytes: Bytes that have to come; 0 for an alias of another tensor, or where all is covered.
        disk_nbytes: Those of them that have to come from disk.
        sources: Indices of the source manifests that give some of it.
    """

    name: str
    way: Way
    reason: str
    nbytes: int
    disk_nbytes: int = 0
    sources: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The copies that a target rank needs.

    Attributes:
        ways: One for each target tensor, in the manifest's order.
        copies: For each source manifest, by index, its copies in the order of the source's flat space;
            contiguous ones that continue each other are merged.
        disk: What has to come from disk.
        nowhere: The tensors, or slots of tensors, that neither a source nor the disk has.
    """

    ways: tuple[TensorWay, ...]
    copies: tuple[tuple[Copy, ...], ...]
    disk: tuple[DiskPiece, ...] = ()
    nowhere: tuple[str, ...] = ()

    def nbytes(self, way: Way) -> int:
        """Bytes that come from disk, or from sources to tensors that are filled in that way."""
        if way == "disk":
            return sum(item.disk_nbytes for item in self.ways)
        return sum(item.nbytes - item.disk_nbytes for item in self.ways if item.way == way)

    def source_bytes(self, index: int) -> int:
        return sum(copy.nbytes for copy in self.copies[index])
