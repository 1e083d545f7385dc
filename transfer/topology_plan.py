"""What would move between two topologies of one model, before there is an instance of either.

Both sides are laid out on the meta device, which takes a `config.json` and no weights. The ranks of the source are
traced once and stay; target ranks follow one after the other, and of each only the figures stay, so that memory holds
one target whatever their number.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.discovery import CONFIG_NAME, MAX_CONFIG_BYTES
from weightwire.transfer.checkpoint.regular_files import printable, read_text
from weightwire.transfer.errors import ConfigError, TopologyError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.loading.loop import UnexpectedPolicy
from weightwire.transfer.local_disk import identity_of
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.models import BuildOptions, parse_config
from weightwire.transfer.models.expected_specs import expected_specs
from weightwire.transfer.plan import Plan, TensorWay, Way
from weightwire.transfer.planning import Planner
from weightwire.transfer.tree_shells import build_rank

Role = Literal["source", "target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How the ranks of one side are laid out.

    Attributes:
        topology: Sizes.
        options: What else decides the shells; their device does not count.
        unexpected: What to make of checkpoint names without a place.
    """

    topology: Topology
    options: BuildOptions = field(default_factory=BuildOptions)
    unexpected: UnexpectedPolicy = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRank:
    """One rank on the meta device.

    Attributes:
        manifest: Without digests.
        opaque: By runtime name, why it is not known what lies there.
        uncovered: By runtime name, how many elements nothing fills.
        seconds: What building and tracing took.
    """

    manifest: Manifest
    opaque: Mapping[str, str]
    uncovered: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank:
    """The figures of one target rank's plan.

    Attributes:
        rank: Global rank of the target.
        ways: One for each tensor, in the manifest's order.
        source_bytes: What each source rank sends to it, by rank.
        copies: Number of them.
        uncovered: By runtime name, how many elements neither a source nor a checkpoint can give.
        opaque: By runtime name, why it is not known what lies there.
        seconds_trace: What building and tracing took.
        seconds_plan: What planning took.
    """

    rank: int
    ways: tuple[TensorWay, ...]
    source_bytes: tuple[int, ...]
    copies: int
    uncovered: Mapping[str, int]
    opaque: Mapping[str, str]
    seconds_trace: float
    seconds_plan: float

    @property
    def nbytes(self) -> int:
        """Bytes that are filled, from sources and from disk."""
        return sum(way.nbytes for way in self.ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyPlan:
    """What the target ranks that were asked for need.

    Attributes:
        ranks: In the order in which they were asked for.
        source_opaque: For each source rank, in order, by runtime name, why it is not known what lies there.
        seconds_trace_source: What tracing all source ranks took.
    """

    ranks: tuple[PlannedRank, ...]
    source_opaque: tuple[Mapping[str, str], ...]
    seconds_trace_source: float

    @property
    def nbytes(self) -> int:
        return sum(rank.nbytes for rank in self.ranks)

    @property
    def copies(self) -> int:
        return sum(rank.copies for rank in self.ranks)

    @property
    def ways(self) -> Counter[Way]:
        """Tensors of all ranks, by the way in which they are filled."""
        return Counter(way.way for rank in self.ranks for way in rank.ways)

    @property
    def source_bytes(self) -> tuple[int, ...]:
        """What each source rank sends to all of them."""
        return tuple(sum(rank.source_bytes[index] for rank in self.ranks) for index in range(len(self.source_opaque)))


def describe_model(path: Path) -> ModelIdentity:
    """A model by its `config.json`, and by the headers of its checkpoint where there are some.

    Args:
        path: A folder, or the `config.json` itself, beside which nothing is looked at.

    Returns:
        Without a revision unless there are headers.

    Raises:
        ConfigError: If there is no `config.json`, or none that describes a known model.
        CheckpointError: If there are files that cannot be a checkpoint, or may not be read.
    """
    if os.path.isdir(path) and any(name.endswith(".safetensors") for name in os.listdir(path)):
        with Checkpoint.open(path) as checkpoint:
            return identity_of(checkpoint, model=printable(path))
    file = path / CONFIG_NAME if os.path.isdir(path) else path
    if not os.path.lexists(file):
        raise ConfigError(f"{printable(path)!r}: has no {CONFIG_NAME}, expected one that names the architecture")
    config = read_text(file, max_bytes=MAX_CONFIG_BYTES)
    return ModelIdentity(model=printable(path), config=config, checkpoint=expected_specs(parse_config(config)))


def trace_rank(identity: ModelIdentity, side: Side, rank: int) -> TracedRank:
    """Lay out one rank.

    Args:
        identity: With config and checkpoint specs.
        side: Which of its ranks.
        rank: Global rank.

    Raises:
        ConfigError: If there is no config, or none that describes a known model.
        TopologyError: If the model cannot be laid out so.
        LoadError: If checkpoint and shells do not go together.
    """
    began = time.perf_counter()
    _, found = build_rank(
        replace(identity, topology=side.topology, rank=rank),
        replace(side.options, device="meta"),
        unexpected=side.unexpected,
    )
    return TracedRank(
        manifest=found.manifest,
        opaque=found.opaque,
        uncovered=found.uncovered,
        seconds=time.perf_counter() - began,
    )


def plan_topologies(
    identity: ModelIdentity,
    source: Side,
    target: Side,
    ranks: Iterable[int],
    *,
    on_rank: Callable[[Role, int], None] = lambda _role, _rank: None,
) -> TopologyPlan:
    """Plan target ranks that take everything from one instance of another topology, or of the same.

    Args:
        identity: With config and checkpoint specs; see `describe_model`.
        source: All of its ranks are there.
        target: The instance to be filled.
        ranks: Which of its ranks to plan for.
        on_rank: Called before each rank that is traced.

    Raises:
        TransferError: As `trace_rank` and `Planner.plan` do; a `TopologyError` says which side it is about.
    """
    sources: list[Manifest] = []
    opaque: list[Mapping[str, str]] = []
    seconds = 0.0
    for rank in range(source.topology.world_size):
        on_rank("source", rank)
        traced = _traced(identity, source, rank, role="source")
        sources.append(traced.manifest)
        opaque.append(traced.opaque)
        seconds += traced.seconds
    # What it finds out about the sources serves all targets.
    planner = Planner(sources)
    planned: list[PlannedRank] = []
    for rank in ranks:
        on_rank("target", rank)
        planned.append(_plan(planner, _traced(identity, target, rank, role="target")))
    return TopologyPlan(ranks=tuple(planned), source_opaque=tuple(opaque), seconds_trace_source=seconds)


def _plan(planner: Planner, target: TracedRank) -> PlannedRank:
    began = time.perf_counter()
    plan = planner.plan(target.manifest)
    seconds = time.perf_counter() - began
    return PlannedRank(
        rank=target.manifest.rank,
        ways=plan.ways,
        source_bytes=tuple(map(plan.source_bytes, range(len(plan.copies)))),
        copies=sum(map(len, plan.copies)),
        uncovered=_uncovered(target, plan),
        opaque=target.opaque,
        seconds_trace=target.seconds,
        seconds_plan=seconds,
    )


def _uncovered(target: TracedRank, plan: Plan) -> Mapping[str, int]:
    """By runtime name, how many elements neither a source nor a checkpoint can give."""
    found = dict(target.uncovered)
    for piece in plan.disk:
        if piece.name is None:
            found.setdefault(piece.tensor, piece.runtime.numel)
    return found


def _traced(identity: ModelIdentity, side: Side, rank: int, *, role: Role) -> TracedRank:
    try:
        return trace_rank(identity, side, rank)
    except TopologyError as error:
        raise TopologyError(f"{role}: {error}", **error.facts) from error
