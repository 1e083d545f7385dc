"""Why a checkpoint tensor goes where it goes: the questions asked about its name, up to the one that decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weightwire.transfer.checkpoint import Checkpoint, CheckpointFiles, DiscoveryOptions, find_checkpoint
from weightwire.transfer.checkpoint.discovery import CONFIG_NAME, MAX_CONFIG_BYTES
from weightwire.transfer.checkpoint.regular_files import printable, read_text
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.errors import ConfigError
from weightwire.transfer.loading.loop import land_by_tables
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.outcomes import NameOutcome
from weightwire.transfer.loading.resolver import Query
from weightwire.transfer.manifest import CheckpointSpec, Topology
from weightwire.transfer.models import BuildOptions, ParameterTree, build_model, parse_config
from weightwire.transfer.regions import Region, row_major_strides
from weightwire.transfer.tracing import trace_placement

_ONE_RANK = Topology()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One step of a model's table.

    Attributes:
        number: Its index in the table.
        about: What is asked.
        needs: The fact that decides, besides the name.
        renamed: The name that the questions behind it are about; None where it changed nothing.
    """

    number: int
    about: str
    needs: str
    renamed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What becomes of one name on one rank.

    Attributes:
        name: As the checkpoint has it.
        is_there: Whether the checkpoint has such a tensor.
        rank: Global rank.
        renames: Questions that gave it another name, in order.
        decided: The question that ended it.
        outcomes: What it decided; the first counts.
        pieces: Which elements go where, as `tensor[0:4, :] -> shell[4:8, :]`; empty where the tensor is not there or
            a loader computes something of it.
        is_computed: Whether a loader computes something of it.
    """

    name: str
    is_there: bool
    rank: int
    renames: tuple[Question, ...]
    decided: Question
    outcomes: tuple[NameOutcome, ...]
    pieces: tuple[str, ...] = ()
    is_computed: bool = False


def explain_names(
    path: Path,
    names: Sequence[str],
    *,
    topology: Topology = _ONE_RANK,
    rank: int = 0,
    build: BuildOptions | None = None,
    options: DiscoveryOptions | None = None,
) -> tuple[Explanation, ...]:
    """Ask a checkpoint's model about names. Headers and `config.json` are read, and no tensor.

    Args:
        path: A folder, or one file of it.
        names: As a checkpoint has them, whether or not this one does.
        topology: Of the instance.
        rank: Global rank.
        build: How shells are laid out; they are not allocated.
        options: As for a load.

    Raises:
        CheckpointError: If a load would be refused because of the files.
        ConfigError: If there is no `config.json` of a known architecture.
        TopologyError: If the model cannot be laid out so.
    """
    files = find_checkpoint(path, options or DiscoveryOptions())
    config = files.folder / CONFIG_NAME
    if not config.exists():
        raise ConfigError(
            f"folder {printable(files.folder)!r}: has no {CONFIG_NAME}, expected one that names the model"
        )
    parsed = parse_config(read_text(config, max_bytes=MAX_CONFIG_BYTES))
    tree = build_model(parsed, topology, rank, replace(build or BuildOptions(), device="meta"))
    specs = _specs(files)
    return tuple(_explain(tree, name, specs.get(name)) for name in names)


def _specs(files: CheckpointFiles) -> Mapping[str, CheckpointSpec]:
    if files.container != "safetensors":
        return {}
    with Checkpoint.open_files(files) as checkpoint:
        return {spec.name: spec for spec in specs_of(checkpoint)}


def _explain(tree: ParameterTree, name: str, spec: CheckpointSpec | None) -> Explanation:
    resolver = tree.resolver()
    *before, (last, outcomes) = resolver.trail(name)
    pieces, is_computed = ((), False) if spec is None else _pieces(tree, spec)
    assert not isinstance(outcomes, Query)
    return Explanation(
        name=name,
        is_there=spec is not None,
        rank=tree.place.rank,
        renames=tuple(_question(tree, number, found) for number, found in before),
        decided=_question(tree, last, outcomes),
        outcomes=outcomes,
        pieces=pieces,
        is_computed=is_computed,
    )


def _question(tree: ParameterTree, number: int, found: Query | tuple[NameOutcome, ...]) -> Question:
    step = tree.resolver().steps[number]
    renamed = found.name if isinstance(found, Query) else None
    return Question(number=number, about=step.about, needs=step.needs, renamed=renamed)


def _pieces(tree: ParameterTree, spec: CheckpointSpec) -> tuple[tuple[str, ...], bool]:
    """Run the loaders of this one tensor without data."""
    shells = shells_of(tree)
    trace = trace_placement(lambda pairs: list(land_by_tables(tree.resolver(), pairs, shells)), shells, [spec])
    pieces = (
        f"tensor{_where(copy.source, spec.shape)} -> {copy.shell}{_where(copy.target, tuple(shells[copy.shell].shape))}"
        for copy in trace.copies
        if copy.source.numel
    )
    return tuple(pieces), bool(trace.opaque)


def _where(region: Region, shape: Sequence[int]) -> str:
    """A region in the coordinates of its tensor, as an index in Python; empty where it is no box, or the whole."""
    sizes = dict(zip(region.strides, region.shape, strict=True))
    rest, parts = region.offset, list[str]()
    for size, stride in zip(shape, row_major_strides(shape), strict=True):
        begin, rest = divmod(rest, stride)
        length = sizes.get(stride, 1) if size > 1 else 1
        parts.append(":" if length == size else str(begin) if length == 1 else f"{begin}:{begin + length}")
    return f"[{', '.join(parts)}]" if set(parts) - {":"} else ""
