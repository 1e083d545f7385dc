"""Dry runs: what a transfer would take from where, before anything moves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weightwire.service.instances import Instance
from weightwire.service.manifests import Manifests
from weightwire.service.matching import Choice, Reason, Want, choose_sources
from weightwire.service.registry import Registry
from weightwire.service.transfers import Transfers
from weightwire.transfer.errors import NotFoundError, RequestError
from weightwire.transfer.layouts import extended_layout
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.planning import Plan, Way, plan_pull


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The plan of one target rank.

    Attributes:
        plan: Its sources are numbered in the order of `holders`.
        holders: For the digest of each source manifest, the instances that hold it, best first.
    """

    rank: int
    plan: Plan
    holders: Mapping[str, tuple[str, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes that would be filled, from peers and disk."""
        return sum(way.nbytes for way in self.plan.ways)

    @property
    def source_bytes(self) -> Mapping[str, int]:
        """Bytes that would come from each source manifest, by digest."""
        return {digest: self.plan.source_bytes(index) for index, digest in enumerate(self.holders)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The plans of all target ranks that were asked for; `seconds` is what planning took, all together."""

    revision: str | None
    weight_version: int | None
    ranks: tuple[RankPlan, ...]
    reasons: tuple[Reason, ...]
    seconds: float

    @property
    def copies(self) -> int:
        return sum(len(copies) for rank in self.ranks for copies in rank.plan.copies)

    @property
    def ways(self) -> Counter[Way]:
        """Tensors, by the way in which they would be filled."""
        return Counter(way.way for rank in self.ranks for way in rank.plan.ways)


class Planner:
    """Plans what a transfer would do now. Takes long for large manifests: run it in a thread."""

    def __init__(
        self,
        registry: Registry,
        transfers: Transfers,
        manifests: Manifests,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._transfers = transfers
        self._manifests = manifests
        self._clock = clock

    def dry_run(self, want: Want, targets: Sequence[Manifest] | None) -> DryRun:
        """Plan without granting anything.

        Args:
            want: As a transfer would ask.
            targets: Manifests of the target ranks to plan for; None takes the layout of the preferred source.

        Raises:
            NotFoundError: If nobody can serve the model and there is no target to plan for.
            RequestError: If a target manifest is of another model or topology, or two are of one rank.
            ManifestMismatchError: If a source holds a tensor of a target in another dtype or shape.
        """
        _check_targets(targets or (), want)
        choice = choose_sources(
            self._registry.instances(model=want.model),
            want,
            readers=self._transfers.active_readers(),
            now=self._clock(),
        )
        if targets is None and not choice.sources:
            raise _nobody(want, choice)
        layouts: dict[int, Manifest | None] = dict.fromkeys(range(want.topology.world_size))
        if targets is not None:
            layouts = {target.rank: target for target in targets}
        # A manifest that several instances hold is one source to plan with: they share the work.
        started = time.perf_counter()
        ranks = tuple(self._plan_rank(rank, layout, choice.sources) for rank, layout in layouts.items())
        return DryRun(
            revision=choice.revision,
            weight_version=choice.weight_version,
            ranks=ranks,
            reasons=choice.reasons,
            seconds=time.perf_counter() - started,
        )

    def _plan_rank(self, rank: int, target: Manifest | None, sources: Sequence[Instance]) -> RankPlan:
        holders = _holders(sources, rank)
        held = [self._manifests.read(digest) for digest in holders]
        # The source says which tensors its checkpoint has; what it does not hold of them shows as missing.
        layout = extended_layout(held[0], held[0].checkpoint) if target is None else target
        return RankPlan(rank=rank, plan=plan_pull(layout, held), holders=holders)


def _holders(sources: Sequence[Instance], rank: int) -> Mapping[str, tuple[str, ...]]:
    """Ids of the instances that hold each manifest of a rank, best first."""
    holders: dict[str, tuple[str, ...]] = {}
    for source in sources:
        publication = source.ranks[rank].publication
        assert publication is not None, "choose_sources takes sources that have published"
        holders[publication.digest] = (*holders.get(publication.digest, ()), source.instance_id)
    return holders


def _check_targets(targets: Sequence[Manifest], want: Want) -> None:
    if len({target.rank for target in targets}) != len(targets):
        raise RequestError("target manifests: two are of one rank")
    for target in targets:
        for name, given, asked in (("model", target.model, want.model), ("topology", target.topology, want.topology)):
            if given != asked:
                raise RequestError(f"target manifest of rank {target.rank}: {name} is {given!r}, asked for {asked!r}")


def _nobody(want: Want, choice: Choice) -> NotFoundError:
    return NotFoundError(
        f"model {want.model!r}: no instance can serve it now, and no target manifest was given",
        kind="source",
        name=want.model,
        reasons=[{"instance_id": reason.instance_id, "reason": reason.reason} for reason in choice.reasons],
    )
