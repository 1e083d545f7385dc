"""What one run of a weight loader does, as values: copies, fills, and what is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightwire.transfer.coverage import Coverage
from weightwire.transfer.regions import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCopy:
    """`shell[target] <- checkpoint[source]`, element for element.

    Attributes:
        shell: Runtime name, the first of those that share the storage.
        target: Elements of the storage that the shell lies in.
        name: Checkpoint name.
        source: Elements of the row-major checkpoint tensor.
        is_cast: Whether the copy converts the dtype.
    """

    shell: str
    target: Region
    name: str
    source: Region
    is_cast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedFill:
    """`shell[target] = value`, such as the zeros of padding."""

    shell: str
    target: Region
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one run of a loader does.

    Names of the same elements (tied parameters) are one shell here, under the first of them.

    Attributes:
        events: Copies and fills in the order in which the loader made them; of opaque shells none.
        opaque: By runtime name, why it is not known what lies there.
        feeds: By opaque runtime name, the checkpoint tensors that reach it or in whose turn it was written.
        ordinary: What to give to the ordinary loader after a replay if anything is opaque, even if it is nothing: all
            that feeds opaque shells, and all that feeds others which these tensors would leave half overwritten.
        coverage: By runtime name, how often its elements are written, as far as that is known.
        used: Checkpoint names that the loader took from its iterator.
    """

    events: tuple[TracedCopy | TracedFill, ...]
    opaque: Mapping[str, str]
    feeds: Mapping[str, frozenset[str]]
    ordinary: frozenset[str]
    coverage: Mapping[str, Coverage]
    used: frozenset[str]

    @property
    def copies(self) -> tuple[TracedCopy, ...]:
        return tuple(event for event in self.events if isinstance(event, TracedCopy))

    @property
    def uncovered(self) -> Mapping[str, int]:
        """Elements that nothing wrote, by runtime name; opaque shells aside."""
        return {
            name: found.missing for name, found in self.coverage.items() if found.missing and name not in self.opaque
        }

    @property
    def overwritten(self) -> Mapping[str, int]:
        """Writes beyond the first, by runtime name; the last one counts."""
        return {name: found.repeated for name, found in self.coverage.items() if found.repeated}
