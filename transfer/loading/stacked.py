"""Which checkpoint tensors are parts of a fused shell: `q_proj`, `k_proj`, `v_proj` in `qkv_proj`, gate and up in one.

Names are matched by whole dotted components. A substring would find `v_proj` in `qkv_proj` and `up_proj` in
`gate_up_proj`, and mangle a checkpoint that is fused already.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.loading.slots import SlotId

# GPTQ files carry biases that the model does not have; old FP8 files a scale that is not one of a projection.
OPTIONAL_SUFFIXES = (".bias", ".kv_scale")


@dataclass(frozen=True, slots=True)
class StackedRow:
    """One part of a fused shell.

    Attributes:
        fused: Component of the runtime name, as `qkv_proj`.
        part: Component of the checkpoint name, as `q_proj`.
        slot: Which part it is, whatever the order of arrival: a string for q, k and v, a number for gate and up.
    """

    fused: str
    part: str
    slot: str | int


STANDARD_ROWS = (
    StackedRow("qkv_proj", "q_proj", "q"),
    StackedRow("qkv_proj", "k_proj", "k"),
    StackedRow("qkv_proj", "v_proj", "v"),
    StackedRow("gate_up_proj", "gate_proj", 0),
    StackedRow("gate_up_proj", "up_proj", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """What the stacked rows make of a name: one of four results.

    Attributes:
        outcome: PLACED, SKIPPED_OPTIONAL or UNEXPECTED if a row matched, None if none did. Only PLACED says that
            there is a shell: the target alone does not.
        target: Renamed name, if a row matched.
        slot: Slot of the row.
    """

    outcome: Outcome | None = None
    target: str | None = None
    slot: SlotId = None


NO_MATCH = Dispatch()


@dataclass(frozen=True, slots=True)
class StackedTable:
    """The rows of a model. A part stands in one row only, so that the order of the rows decides nothing.

    Attributes:
        rows: As declared.
        experts: Names below this component are the expert table's: renamed here, no table would know them.
    """

    rows: tuple[StackedRow, ...]
    experts: str = "experts"
    _by_part: Mapping[str, StackedRow] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_part = {row.part: row for row in self.rows}
        if len(by_part) != len(self.rows):
            raise ValueError(f"stacked rows: a part stands in two of {[row.part for row in self.rows]}")
        if dotted := [row.part for row in self.rows if "." in row.part or not row.part]:
            raise ValueError(f"stacked rows: {dotted} are no single components of a name")
        object.__setattr__(self, "_by_part", by_part)

    def match(self, name: str) -> tuple[str, SlotId] | None:
        """Rename the component nearest to the end that is a part of something; the rest stays as it is.

        Args:
            name: Full or relative checkpoint name.

        Returns:
            Runtime name and slot, whether or not there is such a shell.
        """
        components = name.split(".")
        if self.experts in components:
            return None
        for index in range(len(components) - 1, -1, -1):
            if row := self._by_part.get(components[index]):
                return ".".join((*components[:index], row.fused, *components[index + 1 :])), row.slot
        return None

    def dispatch(
        self, name: str, shell_names: Container[str], *, optional_suffixes: tuple[str, ...] = OPTIONAL_SUFFIXES
    ) -> Dispatch:
        """Match, and look whether the shell is there.

        A name that has a shell of its own is no part of another one.
        """
        found = None if name in shell_names else self.match(name)
        if found is None:
            return NO_MATCH
        target, slot = found
        if target in shell_names:
            return Dispatch(outcome=Outcome.PLACED, target=target, slot=slot)
        optional = target.endswith(optional_suffixes)
        outcome = Outcome.SKIPPED_OPTIONAL if optional else Outcome.UNEXPECTED
        return Dispatch(outcome=outcome, target=target, slot=slot)


STANDARD_TABLE = StackedTable(STANDARD_ROWS)
