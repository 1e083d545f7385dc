"""Topology flags, as values."""

from __future__ import annotations

import json
from pathlib import Path

from weightwire.transfer.checkpoint.regular_files import read_text
from weightwire.transfer.errors import ManifestError, SettingsError
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions

# No expert map is longer.
_MAX_MAP_BYTES = 16 << 20
# Numbers beyond these are slips of the hand; the largest that Python prints are not so much larger.
_MOST_RANKS = 1 << 20
_MOST_DIGITS = 20
_MOST_ROWS = (1 << 31) - 1


def chosen_topology(*, tp: int | None, pp: int | None, ep: int | None) -> Topology | None:
    """None if no flag was given: then tensors are whole, under their checkpoint names.

    Raises:
        SettingsError: If the sizes make no topology.
    """
    if tp is None and pp is None and ep is None:
        return None
    if (tp or 1) * (pp or 1) > _MOST_RANKS:
        raise SettingsError(f"--tp, --pp: more than {_MOST_RANKS} ranks")
    try:
        return Topology(tp=tp or 1, pp=pp or 1, ep=ep or 1)
    except ManifestError as error:
        raise SettingsError(f"--tp, --pp, --ep: {error}") from error


def chosen_ranks(rank: str, topology: Topology) -> range:
    """One global rank, or all of them.

    Raises:
        SettingsError: If it is neither `all` nor a rank of the topology.
    """
    if rank == "all":
        return range(topology.world_size)
    # A number of thousands of digits is one that `int` refuses.
    is_number = rank.isdecimal() and rank.isascii() and len(rank) <= _MOST_DIGITS
    if not is_number or int(rank) >= topology.world_size:
        raise SettingsError(f"--rank {rank[:_MOST_DIGITS]}: expected all, or 0 to {topology.world_size - 1}")
    return range(int(rank), int(rank) + 1)


def chosen_epoch(epoch: int | None, *, ranks: range, topology: Topology) -> int | None:
    """The instance's epoch; None is the generation of its only process.

    Processes that start at different times can agree on a number alone: they have no generation in common.
    """
    return 1 if epoch is None and len(ranks) < topology.world_size else epoch


def check_can_be_found(instance_id: str | None, *, ranks: range, topology: Topology) -> None:
    """Raises:
    SettingsError: If the other ranks are other processes, and could not know that they belong to this one.
    """
    others = topology.world_size - len(ranks)
    if instance_id is None and others:
        what = "rank is another process" if others == 1 else f"{others} ranks are other processes"
        raise SettingsError(f"--rank {ranks[0]}: the other {what}, expected --instance-id, the same for all")


def check_unused(*, rank: str, options: BuildOptions) -> None:
    """Refuse flags that mean something only for a topology, where none was chosen.

    Raises:
        SettingsError: Naming them.
    """
    given = {
        "--rank": rank not in ("all", "0"),
        "--vocab-multiple": options.vocab_multiple is not None,
        "--pad-heads": options.pad_heads,
        "--expert-map": options.expert_map is not None,
        "--role": options.role != "main",
        "--fuse-shared-expert": options.fuse_shared_expert,
    }
    unused = [flag for flag, is_given in given.items() if is_given]
    if unused:
        raise SettingsError(f"{', '.join(unused)}: only for a topology, expected one of --tp, --pp, --ep too")


def build_options(*, vocab_multiple: int | None, pad_heads: bool, expert_map: Path | None) -> BuildOptions:
    """How shells are laid out.

    Raises:
        SettingsError: If the file is no expert map, or the multiple no size of a vocabulary.
        CheckpointError: If it cannot be read.
    """
    if vocab_multiple is not None and vocab_multiple > _MOST_ROWS:
        raise SettingsError(f"--vocab-multiple: is more than {_MOST_ROWS} rows")
    return BuildOptions(
        vocab_multiple=vocab_multiple,
        pad_heads=pad_heads,
        expert_map=None if expert_map is None else _read_map(expert_map),
    )


def _read_map(path: Path) -> tuple[tuple[int, ...], ...]:
    refusal = SettingsError(f"--expert-map {path}: expected a JSON list of lists of expert numbers")
    try:
        value = json.loads(read_text(path, max_bytes=_MAX_MAP_BYTES))
    except (ValueError, RecursionError) as error:
        raise refusal from error
    if not isinstance(value, list) or not all(isinstance(slots, list) for slots in value):
        raise refusal
    # `type() is`, since a JSON true would pass for an int.
    if any(type(expert) is not int for slots in value for expert in slots):
        raise refusal
    return tuple(tuple(slots) for slots in value)
