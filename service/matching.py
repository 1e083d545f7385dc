"""Which sources a target is granted, and why the others are not: a pure choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weightwire.service.instances import Instance
from weightwire.service.quarantine import Verdict
from weightwire.transfer.manifest import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What a target asks for; None leaves the choice to the service."""

    model: str
    revision: str | None
    weight_version: int | None
    topology: Topology
    exclude_instance: str | None
    max_sources: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why an instance of the model was not taken."""

    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The sources, best first; all of them hold `revision` at `weight_version`.

    Without any source both are what was asked for.
    """

    revision: str | None
    weight_version: int | None
    sources: tuple[Instance, ...]
    reasons: tuple[Reason, ...]


def choose_sources(
    instances: Iterable[Instance],
    want: Want,
    *,
    readers: Mapping[str, int],
    now: float,
    verdicts: Mapping[str, Verdict] | None = None,
) -> Choice:
    """Choose among the instances of one model.

    A source is live and complete, and has the revision and version that were asked for; its topology may be any.
    Where these are open, the newest weight version wins, then the revision that most instances hold, then the
    revision that sorts first. Sources of the target's own topology come first, then those that hold more bytes, then
    those whose manifests more instances share, then those with fewer running transfers, then by id.

    Args:
        instances: Candidates; those of other models, and the target itself, are passed over.
        want: What the target asks for.
        readers: Running transfers of each source instance, by id.
        now: Time at which leases are looked at.
        verdicts: Instances in quarantine. One about which nobody is certain is taken if no other holds the same.
    """
    verdicts = verdicts or {}
    reasons: dict[str, str] = {}
    fitting: list[Instance] = []
    for instance in instances:
        if instance.model != want.model or instance.instance_id == want.exclude_instance:
            continue
        verdict = verdicts.get(instance.instance_id)
        reason = verdict.reason if verdict is not None and verdict.is_certain else _why_not(instance, want, now)
        if reason is None:
            fitting.append(instance)
        else:
            reasons[instance.instance_id] = reason
    holders = Counter((instance.weight_version or 0, instance.revision or "") for instance in fitting)
    if not holders:
        return Choice(revision=want.revision, weight_version=want.weight_version, sources=(), reasons=_sorted(reasons))
    # Open questions are settled among those that fit only: a newer version that nobody can serve does not count.
    version, revision = min(holders, key=lambda held: (-held[0], -holders[held], held[1]))
    sources: list[Instance] = []
    trusted = any(
        (instance.weight_version, instance.revision) == (version, revision) and instance.instance_id not in verdicts
        for instance in fitting
    )
    for instance in _ordered(fitting, want.topology, readers):
        if (instance.weight_version, instance.revision) != (version, revision):
            reasons[instance.instance_id] = (
                f"holds revision {instance.revision!r} at weight version {instance.weight_version}, "
                f"the transfer takes {revision!r} at {version}"
            )
        elif trusted and instance.instance_id in verdicts:
            reasons[instance.instance_id] = verdicts[instance.instance_id].reason
        elif len(sources) == want.max_sources:
            reasons[instance.instance_id] = f"{want.max_sources} other sources are preferred"
        else:
            sources.append(instance)
    return Choice(revision=revision, weight_version=version, sources=tuple(sources), reasons=_sorted(reasons))


def _why_not(instance: Instance, want: Want, now: float) -> str | None:
    if (reason := instance.why_no_source(now)) is not None:
        return reason
    if want.revision not in (None, instance.revision):
        return f"revision is {instance.revision!r}, asked for {want.revision!r}"
    if want.weight_version not in (None, instance.weight_version):
        return f"weight version is {instance.weight_version}, asked for {want.weight_version}"
    return None


def _ordered(instances: list[Instance], topology: Topology, readers: Mapping[str, int]) -> list[Instance]:
    sharing = Counter(instance.digests for instance in instances)
    return sorted(
        instances,
        key=lambda instance: (
            # Each target rank finds all that it needs on one rank of these, as it lies there.
            instance.topology != topology,
            -instance.nbytes,
            -sharing[instance.digests],
            # Keeps the holders of one manifest together: a target plans each manifest once.
            instance.digests,
            readers.get(instance.instance_id, 0),
            instance.instance_id,
        ),
    )


def _sorted(reasons: Mapping[str, str]) -> tuple[Reason, ...]:
    return tuple(Reason(instance_id=name, reason=reasons[name]) for name in sorted(reasons))
