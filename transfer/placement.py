"""Which checkpoint regions lie in which runtime regions of a rank."""

from __future__ import annotations

from dataclasses import dataclass

from weightwire.transfer.errors import ManifestError
from weightwire.transfer.regions import Region, row_major


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPiece:
    """One copy that a weight loader makes: `runtime <- checkpoint`, element for element.

    Attributes:
        name: Checkpoint name (global, unsharded).
        checkpoint: Elements of the row-major checkpoint tensor.
        runtime: Elements of the storage that the runtime tensor lies in.
    """

    name: str
    checkpoint: Region
    runtime: Region

    def __post_init__(self) -> None:
        if self.checkpoint.shape != self.runtime.shape:
            raise ManifestError(
                f"placement of {self.name!r}: shape {list(self.checkpoint.shape)} in the checkpoint, "
                f"{list(self.runtime.shape)} in the shell, expected equal shapes"
            )

    def to_json(self) -> list[object]:
        return [self.name, self.checkpoint.to_json(), self.runtime.to_json()]

    @classmethod
    def from_json(cls, value: object) -> PlacedPiece:
        match value:
            case [str(name), checkpoint, runtime]:
                return cls(name=name, checkpoint=Region.from_json(checkpoint), runtime=Region.from_json(runtime))
        raise ManifestError(f"placement {value!r}: expected [name, region, region]")


def place_whole(name: str, runtime: Region) -> tuple[PlacedPiece, ...]:
    """The placement of a runtime tensor that is one whole checkpoint tensor, unsharded."""
    return (PlacedPiece(name=name, checkpoint=row_major(runtime.shape), runtime=runtime),)
