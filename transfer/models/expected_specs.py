"""The tensors that a model's checkpoint is expected to have, told by its `config.json` alone.

No list for each architecture: a tree on one rank has a slot for every tensor of the checkpoint, its loaders know how
large these are, and its tables how names are made into those of shells. Here the tables are read backwards, and a name
counts only if the tree's own resolver brings it back to its slot.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weightwire.transfer.dtypes import dtype_of
from weightwire.transfer.errors import ConfigError
from weightwire.transfer.loading.base_loaders import AxisCuts, WholeLoader, loader_of
from weightwire.transfer.loading.expert_loaders import ExpertLoader
from weightwire.transfer.loading.expert_names import ExpertTable
from weightwire.transfer.loading.halves import HalvesLoader
from weightwire.transfer.loading.mappers import WeightsMapper
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.loading.resolver import NameTables, Resolver
from weightwire.transfer.loading.scale_loaders import ExpertInputScaleLoader, ExpertScaleLoader, PartScaleLoader
from weightwire.transfer.loading.slots import ExpertPart, ShellLoader, SlotId, slot_text
from weightwire.transfer.loading.stacked import StackedTable
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.models.blueprint import BuildOptions
from weightwire.transfer.models.config import ModelConfig
from weightwire.transfer.models.registry import build_model

_SCALES = ("_scale", "_scale_inv")


def expected_specs(config: ModelConfig) -> tuple[CheckpointSpec, ...]:
    """Name, dtype and shape of every tensor, in the order of the model's parameters.

    A tied head is no tensor of its own; each matrix of each expert is one. A published checkpoint may have more names
    than these (rotary tables, biases of zeros), and other dtypes than the one that its configuration names.

    Args:
        config: Of an architecture that has a tree.

    Raises:
        ConfigError: If a name cannot be told.
        TopologyError: If the sizes do not go together.
    """
    tree = build_model(config, options=BuildOptions(device="meta"))
    resolver = tree.resolver()
    found: list[CheckpointSpec] = []
    for target, shell in shells_of(tree).items():
        loader, dtype = loader_of(shell), dtype_of(shell).name
        for slot in loader.slots:
            shape = _shape(shell, loader, slot)
            told = loader.checkpoint_spec(slot)[0] if isinstance(loader, HalvesLoader) else None
            names = () if shape is None else _candidates(target, slot, tree.tables, has_blocks=bool(shape))
            name = next((name for name in names if _leads_to(resolver, name, target, slot)), None)
            if shape is None or name is None:
                raise ConfigError(
                    f"{config.architecture}: it does not say what the checkpoint calls {slot_text(target, slot)!r}, or "
                    "how large that is, expected a folder with the checkpoint's files beside config.json",
                    tensor=target,
                )
            found.append(
                CheckpointSpec(name=name, dtype=str(told).removeprefix("torch.") if told else dtype, shape=shape)
            )
    return tuple(found)


def _leads_to(resolver: Resolver, name: str, target: str, slot: SlotId) -> bool:
    found = resolver.resolve(name)
    return (found.outcome, found.target, found.slot) == (Outcome.PLACED, target, slot)


def _shape(shell: torch.Tensor, loader: ShellLoader, slot: SlotId) -> tuple[int, ...] | None:
    """Of the whole checkpoint tensor that fills a slot of the only rank's shell; None for a loader of unknown kind."""
    shape = tuple(shell.shape)
    if isinstance(loader, WholeLoader):
        return shape
    if isinstance(loader, ExpertLoader):
        return (loader.intermediate, shape[2]) if loader.matrix == "w13" else (shape[1], loader.intermediate)
    if isinstance(loader, PartScaleLoader | ExpertScaleLoader | ExpertInputScaleLoader):
        return ()
    if isinstance(loader, HalvesLoader):
        return loader.checkpoint_spec(slot)[1]
    cuts = getattr(loader, "cuts", None)
    if not isinstance(cuts, AxisCuts):
        return None
    return (*shape[: cuts.axis], dict(cuts.parts)[slot].size, *shape[cuts.axis + 1 :])


def _candidates(target: str, slot: SlotId, tables: NameTables, *, has_blocks: bool) -> Iterator[str]:
    """What the tensor of a slot may be called, the likeliest first."""
    if isinstance(slot, ExpertPart):
        name = _expert_name(target, slot, tables.experts)
    else:
        found = (_part_name(target, slot, table) for table in (tables.stacked, *tables.further_parts))
        name = target if slot is None else next((name for name in found if name), None)
    if name is None:
        return
    if name.endswith(_SCALES):
        # Of the spellings that an architecture knows its own is the usual one; that of blocks is the same everywhere.
        yield f"{name}_inv" if has_blocks else name
        yield name
    yield from _before(name, tables.mapper)


def _part_name(target: str, slot: SlotId, table: StackedTable) -> str | None:
    """The part of a fused shell that a slot is, or the scale of a part."""
    part_slot, _, leaf = slot.partition(".") if isinstance(slot, str) else (slot, "", "")
    parts = {row.fused: row.part for row in table.rows if row.slot == part_slot}
    components = target.split(".")
    for index in range(len(components) - 1, -1, -1):
        if part := parts.get(components[index]):
            return ".".join((*components[:index], part, *([leaf] if leaf else components[index + 1 :])))
    return None


def _expert_name(target: str, slot: ExpertPart, table: ExpertTable | None) -> str | None:
    """`experts.w13_weight` and a slot of it to `experts.3.up_proj.weight`."""
    path, _, leaf = target.rpartition(".")
    _, separator, rest = leaf.partition("_")
    if table is None or not separator:
        return None
    matrix = {"w1": table.gate, "w3": table.up, "w2": table.down}[slot.part]
    return f"{path}.{slot.expert}.{matrix}.{rest}"


def _before(name: str, mapper: WeightsMapper) -> Iterator[str]:
    """The names that a mapper may have made into this one, itself last."""
    found = [name]
    # The last table that a name went through is undone first.
    for renames, undone in (
        (mapper.suffixes, _without_suffix),
        (mapper.prefixes, _without_prefix),
        (mapper.substrings, _without_substring),
    ):
        pairs = [(old, new) for old, new in renames.items() if new is not None]
        older = [undone(text, old, new) for text in found for old, new in pairs]
        found = [text for text in older if text is not None] + found
    yield from found


def _without_suffix(text: str, old: str, new: str) -> str | None:
    return text.removesuffix(new) + old if text.endswith(new) else None


def _without_prefix(text: str, old: str, new: str) -> str | None:
    return old + text.removeprefix(new) if text.startswith(new) else None


def _without_substring(text: str, old: str, new: str) -> str | None:
    return text.replace(new, old, 1) if new in text else None
