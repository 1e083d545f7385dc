"""What a target asks for, what it gets, and what it may hear on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weightwire.service.client.api import Grant
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.filling import FillResult, SourceBytes
from weightwire.transfer.loading.loop import UnexpectedPolicy
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.models import BuildOptions, ParameterTree
from weightwire.transfer.plan import Plan
from weightwire.transfer.session import RankProgress
from weightwire.transfer.shells import Shells
from weightwire.transfer.staging import Staging
from weightwire.transfer.wire.puller import PullOptions, SourceFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """What a target asks for.

    Attributes:
        model: Model id.
        revision: None takes the local checkpoint's, or without one the service's choice.
        checkpoint: The local disk, for what no source holds; its headers fix the shapes.
        shells: Of one rank, filled in place; their manifest says of which rank of which topology.
        topology: Build the parameters of ranks of this topology, by runtime names, and fill them. Without it, and
            without shells, every tensor is taken whole, by its checkpoint name. Sources may have any topology.
        build: How the parameters of a topology are laid out; on the CPU.
        unexpected: What a topology makes of checkpoint names without a place.
        staging: How shells are reached that are made here; those of the caller say so themselves.
        deadline_s: For the whole transfer.
        idempotency_key: Asking again with the same key gives the same transfer.
        relay: Serve what is verified while the rest is received, where the target has a data plane, and will hold
            exactly what a source holds.
    """

    model: str
    revision: str | None = None
    checkpoint: Checkpoint | None = None
    shells: Shells | None = None
    topology: Topology | None = None
    build: BuildOptions = field(default_factory=BuildOptions)
    unexpected: UnexpectedPolicy = "refuse"
    deadline_s: float = 3600.0
    options: PullOptions = field(default_factory=PullOptions)
    staging: Staging = field(default_factory=Staging)
    idempotency_key: str | None = None
    relay: bool = True

    def __post_init__(self) -> None:
        if self.shells is not None and self.topology is not None:
            raise ValueError("pull request: has shells and a topology, expected one of them: shells have their own")

    @property
    def wanted_revision(self) -> str | None:
        return self.revision or (self.checkpoint.revision if self.checkpoint else None)

    @property
    def world(self) -> Topology:
        """The target's topology, as the service is told it."""
        return self.topology or (self.shells.manifest.topology if self.shells else Topology())

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """The ranks that are asked for unless somebody says otherwise."""
        return (self.shells.manifest.rank,) if self.shells else tuple(range(self.world.world_size))

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Raises:
        ValueError: If these are not different ranks of the target, or not the one that the shells are.
        """
        possible = self.all_ranks
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(possible):
            raise ValueError(f"target: asked for ranks {list(ranks)}, expected some of {list(possible)}, each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledRank:
    """A filled rank, and how it was filled.

    Attributes:
        shells: Verified.
        tree: What the shells are the memory of, where a topology was asked for.
    """

    rank: int
    shells: Shells
    result: FillResult
    tree: ParameterTree | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """All ranks of one transfer, filled.

    Attributes:
        ranks: In order of rank; at least one.
        transfer_id: None if the service could not be reached and the disk had everything.
        weight_version: Of the sources; 0 without one.
        seconds: From the question to the last comparison.
        reasons: Why instances of the model were not taken as sources.
    """

    ranks: tuple[PulledRank, ...]
    transfer_id: str | None
    weight_version: int
    seconds: float
    reasons: Mapping[str, str]

    @property
    def shells(self) -> Shells:
        """Those of the only rank.

        Raises:
            ValueError: If there are several.
        """
        return self._only.shells

    @property
    def result(self) -> FillResult:
        """That of the only rank.

        Raises:
            ValueError: If there are several.
        """
        return self._only.result

    @property
    def _only(self) -> PulledRank:
        if len(self.ranks) != 1:
            raise ValueError(f"pulled: {len(self.ranks)} ranks, expected one; `ranks` has them all")
        return self.ranks[0]

    @property
    def bytes_peer(self) -> int:
        return sum(rank.result.bytes_peer for rank in self.ranks)

    @property
    def bytes_disk(self) -> int:
        return sum(rank.result.bytes_disk for rank in self.ranks)

    @property
    def bytes_received(self) -> int:
        return sum(rank.result.bytes_received for rank in self.ranks)

    @property
    def tensors(self) -> Mapping[str, int]:
        """Runtime tensors of all ranks by way."""
        return {way: sum(rank.result.tensors[way] for rank in self.ranks) for way in self.ranks[0].result.tensors}

    @property
    def sources(self) -> tuple[SourceBytes, ...]:
        """What each source rank gave to all ranks together."""
        given = Counter[tuple[str, int]]()
        for rank in self.ranks:
            for source in rank.result.sources:
                given[source.instance_id, source.rank] += source.nbytes
        return tuple(SourceBytes(instance_id=key[0], rank=key[1], nbytes=nbytes) for key, nbytes in given.items())

    @property
    def failures(self) -> tuple[SourceFailure, ...]:
        """Sources that any rank gave up; for one reason each is here once, however many ranks gave it up."""
        found: dict[tuple[str, int, str], SourceFailure] = {}
        for rank in self.ranks:
            for failure in rank.result.failures:
                found.setdefault((failure.instance_id, failure.rank, failure.code), failure)
        return tuple(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PullEvents:
    """What a caller may want to see on the way.

    Attributes:
        on_grant: The sources.
        on_plan: Of each rank, in order, how its tensors will be filled; all of them before a byte moves.
        on_progress: How far a rank is, by its number; from several threads, one call at a time.
    """

    on_grant: Callable[[Grant], None] = lambda _: None
    on_plan: Callable[[Plan, Manifest], None] = lambda _plan, _layout: None
    on_progress: Callable[[int, RankProgress], None] = lambda _rank, _progress: None
