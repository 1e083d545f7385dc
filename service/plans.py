"""Dry runs: what a transfer would take from where, before anything moves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from weightwire.service.grants import GrantedInstance, SourceKey, granted_instance
from weightwire.service.manifests import Manifests
from weightwire.service.matching import Choice, Reason, Want, choose_sources
from weightwire.service.registry import Registry
from weightwire.service.transfers import Transfers
from weightwire.transfer.errors import NotFoundError, RequestError
from weightwire.transfer.layouts import extended_layout
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.plan import Plan, TensorWay, Way
from weightwire.transfer.planning import Supply, plan_pull


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The plan of one target rank.

    Attributes:
        plan: Its sources are numbered in the order of `holders`.
        holders: For each source manifest, the source ranks that hold it, best first.
    """

    rank: int
    plan: Plan
    holders: tuple[tuple[SourceKey, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes that would be filled, from peers and disk."""
        return sum(way.nbytes for way in self.plan.ways)

    @property
    def source_bytes(self) -> Mapping[SourceKey, int]:
        """Bytes that would come from each source rank; those that hold one manifest send equal parts."""
        found: dict[SourceKey, int] = {}
        for index, holders in enumerate(self.holders):
            nbytes, over = divmod(self.plan.source_bytes(index), len(holders))
            for number, holder in enumerate(holders):
                found[holder] = nbytes + (number < over)
        return found

    @property
    def uncovered(self) -> Mapping[str, int]:
        """Elements that no source gives and no checkpoint can give either, by tensor."""
        found: Counter[str] = Counter()
        for piece in self.plan.disk:
            if piece.name is None:
                found[piece.tensor] += piece.runtime.numel
        return found

    def sources_of(self, way: TensorWay) -> list[SourceKey]:
        """The source ranks that give some of a tensor: of each manifest the best holder."""
        return [self.holders[index][0] for index in way.sources]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The plans of all target ranks that were asked for.

    Attributes:
        sources: Every rank of the instances that would be granted, best instance first.
        seconds: What planning took, all ranks together.
    """

    revision: str | None
    weight_version: int | None
    ranks: tuple[RankPlan, ...]
    sources: tuple[GrantedInstance, ...]
    reasons: tuple[Reason, ...]
    seconds: float

    @property
    def copies(self) -> int:
        return sum(len(copies) for rank in self.ranks for copies in rank.plan.copies)

    @property
    def ways(self) -> Counter[Way]:
        """Tensors, by the way in which they would be filled."""
        return Counter(way.way for rank in self.ranks for way in rank.plan.ways)

    @property
    def source_bytes(self) -> Counter[SourceKey]:
        """Bytes that would come from each source rank to all target ranks."""
        return sum((Counter(rank.source_bytes) for rank in self.ranks), Counter[SourceKey]())


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
            want: As a transfer would ask; where it leaves the revision open, that of the targets counts.
            targets: Manifests of the target ranks to plan for; None takes the layout of the preferred source.

        Raises:
            NotFoundError: If nobody can serve the model and there is no target to plan for.
            RequestError: If a target manifest is of another model or topology, or two are of one rank; or if there
                is none, and the preferred source has another topology than was asked for.
            ManifestMismatchError: If a source holds a tensor of a target in another dtype or shape.
        """
        named = next((target.revision for target in targets or () if target.revision), None)
        want = replace(want, revision=want.revision or named)
        _check_targets(targets or (), want)
        choice = choose_sources(
            self._registry.instances(model=want.model),
            want,
            readers=self._transfers.active_readers(),
            verdicts=self._transfers.verdicts(),
            now=self._clock(),
        )
        sources = tuple(map(granted_instance, choice.sources))
        # Each is read once, however many target ranks look at it.
        held = {source.manifest_digest for instance in sources for source in instance.ranks}
        manifests = {digest: self._manifests.read(digest) for digest in sorted(held)}
        layouts = _own_layouts(want, choice, manifests) if targets is None else targets
        started = time.perf_counter()
        ranks = tuple(_plan_rank(layout, sources, manifests) for layout in layouts)
        return DryRun(
            revision=choice.revision,
            weight_version=choice.weight_version,
            ranks=ranks,
            sources=sources,
            reasons=choice.reasons,
            seconds=time.perf_counter() - started,
        )


def _plan_rank(target: Manifest, sources: Sequence[GrantedInstance], manifests: Mapping[str, Manifest]) -> RankPlan:
    # A manifest that several ranks hold is one source to plan with: they share the work.
    holders: dict[str, tuple[SourceKey, ...]] = {}
    for instance in sources:
        for source in instance.in_order_for(target.rank, target.topology):
            holders[source.manifest_digest] = (*holders.get(source.manifest_digest, ()), source.key)
    supply = Supply(capacities=[len(keys) for keys in holders.values()])
    plan = plan_pull(target, [manifests[digest] for digest in holders], supply)
    return RankPlan(rank=target.rank, plan=plan, holders=tuple(holders.values()))


def _own_layouts(want: Want, choice: Choice, manifests: Mapping[str, Manifest]) -> list[Manifest]:
    """The layout of the preferred source, rank by rank, in place of a target's."""
    if not choice.sources:
        raise _nobody(want, choice)
    preferred = choice.sources[0]
    if preferred.topology != want.topology:
        raise RequestError(
            f"model {want.model!r}: source {preferred.instance_id!r} has {preferred.topology}, asked for "
            f"{want.topology}; expected the manifest of each target rank that is to be planned "
            "(`weightwire plan --config` plans without any)",
            instance_id=preferred.instance_id,
        )
    return [_own_layout(manifests[digest]) for digest in preferred.digests]


def _own_layout(manifest: Manifest) -> Manifest:
    """What a target without shells of its own would allocate."""
    # A plain source says which tensors its checkpoint has; what it does not hold of them shows as missing.
    if all(tensor.name in manifest.whole for tensor in manifest.tensors if tensor.is_placed):
        return extended_layout(manifest, manifest.checkpoint)
    return manifest


def _check_targets(targets: Sequence[Manifest], want: Want) -> None:
    if len({target.rank for target in targets}) != len(targets):
        raise RequestError("target manifests: two are of one rank")
    for target in targets:
        for name, given, asked in (
            ("model", repr(target.model), repr(want.model)),
            ("topology", str(target.topology), str(want.topology)),
            ("revision", repr(target.revision or want.revision), repr(want.revision)),
        ):
            if given != asked:
                raise RequestError(f"target manifest of rank {target.rank}: {name} is {given}, asked for {asked}")


def _nobody(want: Want, choice: Choice) -> NotFoundError:
    reasons = "; ".join(f"{reason.instance_id}: {reason.reason}" for reason in choice.reasons)
    return NotFoundError(
        f"model {want.model!r}: no instance can serve it now, and no target manifest was given; "
        f"{reasons or 'no instance has it'}; start `weightwire source`, or plan with --checkpoint",
        kind="source",
        name=want.model,
        reasons=[{"instance_id": reason.instance_id, "reason": reason.reason} for reason in choice.reasons],
    )
