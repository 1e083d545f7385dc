"""Names of routed experts: `experts.3.up_proj.weight` is matrix `w3` of expert 3 in the shell `experts.w13_weight`.

The number is parsed out of the name. A table with three rows for each of 256 experts would be scanned for each tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from weightwire.transfer.loading.slots import ExpertPart, ExpertPartName

# A name is untrusted text: no unicode digits, no leading zeros, no number that int() would refuse.
NUMBER = r"(0|[1-9][0-9]{0,8})"

_SHELL = {"w1": "w13", "w3": "w13", "w2": "w2"}
# Ends of a tensor that holds all experts, without an expert's number.
_WHOLE_LEAF = {"": "weight", "_scale": "weight_scale_inv"}


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """How a checkpoint names its routed experts.

    Attributes:
        num_experts: Experts that have a number in the checkpoint, fused shared ones included.
        gate: Checkpoint component of matrix `w1`; `up` of `w3`, `down` of `w2`. The names `w1`, `w2` and `w3`
            themselves are known too: W4A8 checkpoints name input scales so.
        container: Component, or dotted components, that the numbers follow, in the checkpoint and in the runtime name.
        num_shared: How many of the experts, the last ones, are shared ones that pose as routed.
    """

    num_experts: int
    _: KW_ONLY
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    container: str = "experts"
    num_shared: int = 0
    _parts: Mapping[str, ExpertPartName] = field(init=False, repr=False, compare=False)
    _numbered: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _whole: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts: dict[str, ExpertPartName] = {"w1": "w1", "w2": "w2", "w3": "w3"}
        parts |= {self.gate: "w1", self.up: "w3", self.down: "w2"}
        prefix = rf"((?:.*\.)?{re.escape(self.container)}\.)"
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_numbered", re.compile(rf"{prefix}{NUMBER}\.([^.]+)\.(.+)", re.DOTALL))
        object.__setattr__(self, "_whole", re.compile(rf"{prefix}(gate_up_proj|down_proj)(_scale|\..+)?", re.DOTALL))

    def match(self, name: str) -> tuple[str, ExpertPart | None] | None:
        """Rename what belongs to experts; what follows the matrix is kept, so weights and scales share the rule.

        Args:
            name: Full or relative checkpoint name.

        Returns:
            Runtime name, whether or not there is such a shell, and the slot: an expert's matrix with the checkpoint's
            number, or None for a tensor that holds the matrices of all experts (`experts.gate_up_proj`). None if the
            name is not an expert's, or of an expert that the model does not have.
        """
        if found := self._numbered.fullmatch(name):
            prefix, number, matrix, rest = found.groups()
            part = self._parts.get(matrix)
            expert = int(number)
            declared = matrix in (self.gate, self.up, self.down)
            if part is None or expert >= (self.num_experts if declared else self.num_experts - self.num_shared):
                return None
            return f"{prefix}{_SHELL[part]}_{rest}", ExpertPart(expert, part)
        if found := self._whole.fullmatch(name):
            prefix, matrix, end = found.groups(default="")
            shell = "w13" if matrix == "gate_up_proj" else "w2"
            return f"{prefix}{shell}_{_WHOLE_LEAF.get(end) or end[1:]}", None
        return None


def expert_name_filter(
    wanted: Mapping[int, Collection[int]], mode: Literal["load", "experts_only"], *, container: str = "mlp.experts"
) -> Callable[[str], bool]:
    """A predicate for readers: which tensors are worth fetching.

    Args:
        wanted: For each layer the logical experts that this rank holds; no other layer's experts pass.
        mode: `load` lets every name without an expert's number pass; `experts_only` lets none pass, and serves to
            fetch experts again that are missing after a re-placement.
        container: Components between the layer's number and the expert's.
    """
    if mode not in ("load", "experts_only"):
        raise ValueError(f"expert name filter: no mode {mode!r}, expected 'load' or 'experts_only'")
    pattern = re.compile(rf"(?:^|\.)layers\.{NUMBER}\.{re.escape(container)}\.{NUMBER}\.")
    experts = {layer: frozenset(numbers) for layer, numbers in wanted.items()}

    def is_wanted(name: str) -> bool:
        found = pattern.search(name)
        if found is None:
            return mode == "load"
        return int(found[2]) in experts.get(int(found[1]), ())

    return is_wanted
