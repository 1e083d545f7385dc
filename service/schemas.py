"""The JSON of the API: pydantic stays here, domain values come out and go in."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from weightwire.service.grants import GrantedInstance, GrantedSource, Rate, SourceKey, Transfer, bytes_done
from weightwire.service.instances import Instance, InstanceState, RankProcess
from weightwire.service.matching import Reason, Want
from weightwire.service.plans import DryRun, RankPlan
from weightwire.service.quarantine import Verdict
from weightwire.service.registry import Announcement, RankClaim, Registration
from weightwire.service.transfers import ReportedFailure, SourceBytes, TransferRequest
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.plan import TensorWay, Way
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.wire.limits import LimitOverrides
from weightwire.transfer.wire.pacing import MIN_BYTES_PER_S


def _no_dots(name: str) -> str:
    # Proxies and clients resolve dot segments in a path, so nothing may have such a name.
    if name in (".", ".."):
        raise ValueError("must not be a dot segment")
    return name


Name = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$"), AfterValidator(_no_dots)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of a canonical text, in hex")]
# Strict: a generation in quotes, or `true`, is a caller's mistake, and must not fence anybody off.
Whole = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
Positive = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
BytesPerS = Annotated[int, Field(strict=True, ge=MIN_BYTES_PER_S, le=2**63 - 1)]
MaxSources = Annotated[int, Field(strict=True, ge=1, le=1024)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class TopologyBody(_Request):
    """Sizes of an instance; left out means 1."""

    tp: Positive = 1
    pp: Positive = 1
    ep: Positive = 1

    def to_topology(self) -> Topology:
        return Topology(tp=self.tp, pp=self.pp, ep=self.ep)

    @classmethod
    def of(cls, topology: Topology) -> TopologyBody:
        return cls(tp=topology.tp, pp=topology.pp, ep=topology.ep)


class LimitsBody(_Request):
    """What each process of an instance gives at most; null leaves a limit as the source was started with it."""

    max_readers: Annotated[int, Field(strict=True, ge=0, le=1 << 20)] | None = Field(
        default=None, description="reads at the same time; 0 lets nobody in, and takes the instance out of the matching"
    )
    max_bytes_per_s: BytesPerS | Literal["unlimited"] | None = Field(
        default=None, description="to all readers together"
    )

    def to_overrides(self) -> LimitOverrides:
        return LimitOverrides(max_readers=self.max_readers, max_bytes_per_s=self.max_bytes_per_s)


class LimitsAnswer(_Answer):
    """What somebody set at run time; null: as the source was started."""

    max_readers: int | None
    max_bytes_per_s: int | Literal["unlimited"] | None

    @classmethod
    def of(cls, limits: LimitOverrides) -> LimitsAnswer:
        return cls(max_readers=limits.max_readers, max_bytes_per_s=limits.max_bytes_per_s)


class RankClaimBody(_Request):
    rank: Whole
    generation: Whole
    url: Annotated[str, Field(max_length=2048)] | None = Field(
        default=None, description="null: takes, and does not serve yet"
    )
    certificate_sha256: Digest | None = Field(
        default=None, description="of the certificate, in DER, that is met at an https url; targets take no other"
    )

    def to_claim(self) -> RankClaim:
        return RankClaim(
            rank=self.rank, generation=self.generation, url=self.url, certificate_sha256=self.certificate_sha256
        )


class RegisterBody(_Request):
    """An instance, and the ranks that the caller speaks for."""

    model: Name
    revision: Name | None = Field(default=None, description="null: not known yet; may be set once")
    epoch: Whole
    topology: TopologyBody = TopologyBody()
    ranks: Annotated[list[RankClaimBody], Field(min_length=1, max_length=65536)]
    lease_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    limits: LimitsBody | None = Field(
        default=None, description="as told last, for a service that has forgotten; one that knows better says so"
    )

    def to_registration(self, instance_id: str, *, peer_host: str | None) -> Registration:
        return Registration(
            instance_id=instance_id,
            model=self.model,
            revision=self.revision,
            epoch=self.epoch,
            topology=self.topology.to_topology(),
            ranks=tuple(rank.to_claim() for rank in self.ranks),
            lease_s=self.lease_s,
            peer_host=peer_host,
            limits=LimitOverrides() if self.limits is None else self.limits.to_overrides(),
        )


class PublicationAnswer(_Answer):
    weight_version: int
    manifest_digest: str


class RegisteredRank(_Answer):
    rank: int
    generation: int
    ticket_key: str = Field(description="base64url without padding: checks the tickets of those who read this rank")
    expires_at: datetime
    published: PublicationAnswer | None = Field(description="null: publish, or publish again")


class Registered(_Answer):
    instance_id: str
    epoch: int
    lease_s: float
    expires_at: datetime = Field(description="of the first of the caller's leases to run out")
    ranks: list[RegisteredRank]
    read_token_sha256: list[str] = Field(description="hex digests of the tokens that may read; empty: all may")
    limits: LimitsAnswer = Field(description="to be kept from now on")
    service_version: str


class LeaveQuery(_Request):
    epoch: Annotated[int, Field(ge=0, le=2**63 - 1)]
    rank: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    generation: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None


class InstanceRank(_Answer):
    rank: int
    generation: int
    url: str | None
    certificate_sha256: str | None
    live: bool
    expires_at: datetime
    published: PublicationAnswer | None


class InstanceAnswer(_Answer):
    instance_id: str
    model: str
    revision: str | None
    epoch: int
    topology: TopologyBody
    state: InstanceState
    reason: str | None = Field(description="why it cannot serve; null if it can")
    limits: LimitsAnswer
    ranks: list[InstanceRank]

    @classmethod
    def of(cls, instance: Instance, *, verdict: Verdict | None, now: float) -> InstanceAnswer:
        state, reason = _state(instance, verdict, now)
        return cls(
            instance_id=instance.instance_id,
            model=instance.model,
            revision=instance.revision,
            epoch=instance.epoch,
            topology=TopologyBody.of(instance.topology),
            state=state,
            reason=reason,
            limits=LimitsAnswer.of(instance.limits),
            ranks=[_instance_rank(instance.ranks[rank], now) for rank in sorted(instance.ranks)],
        )


class PublishBody(_Request):
    """What a rank holds; `manifest` is left out or null if the service may know the digest."""

    epoch: Whole
    generation: Whole
    weight_version: Whole
    digest: Digest
    manifest: dict[str, object] | None = None

    def to_announcement(self) -> Announcement:
        """What it says; takes a while for a large manifest.

        Raises:
            ManifestError: If `manifest` is none.
        """
        return Announcement(
            epoch=self.epoch,
            generation=self.generation,
            weight_version=self.weight_version,
            digest=self.digest,
            manifest=None if self.manifest is None else to_manifest(self.manifest),
        )


class Published(_Answer):
    digest: str
    stored: bool = Field(description="true if the manifest was new")


class ModelAnswer(_Answer):
    model: str
    instances: int
    ready: int


class SourcesQuery(_Request):
    revision: Name | None = None


class SourceRank(_Answer):
    rank: int
    url: str | None
    generation: int
    manifest_digest: str | None
    bytes: int | None


class SourceAnswer(_Answer):
    instance_id: str
    epoch: int
    revision: str | None
    weight_version: int | None
    topology: TopologyBody
    state: InstanceState
    reason: str | None
    limits: LimitsAnswer
    active_readers: int
    ranks: list[SourceRank]

    @classmethod
    def of(cls, instance: Instance, *, active_readers: int, verdict: Verdict | None, now: float) -> SourceAnswer:
        state, reason = _state(instance, verdict, now)
        return cls(
            instance_id=instance.instance_id,
            epoch=instance.epoch,
            revision=instance.revision,
            weight_version=instance.weight_version,
            topology=TopologyBody.of(instance.topology),
            state=state,
            reason=reason,
            limits=LimitsAnswer.of(instance.limits),
            active_readers=active_readers,
            ranks=[_source_rank(instance.ranks[rank]) for rank in sorted(instance.ranks)],
        )


class TargetRankBody(_Request):
    rank: Whole
    generation: Whole


class TargetBody(_Request):
    instance_id: Name
    epoch: Whole
    ranks: Annotated[list[TargetRankBody], Field(min_length=1, max_length=65536)]


class TransferBody(_Request):
    """What a target asks for; null leaves the choice to the service."""

    model: Name
    revision: Name | None = None
    weight_version: Whole | None = None
    target: TargetBody
    topology: TopologyBody = TopologyBody()
    deadline_s: Annotated[float, Field(ge=1, le=86400)] = 3600.0
    max_sources: MaxSources = 8
    relay: bool = Field(default=False, description="the target serves what it has verified while it receives the rest")

    def to_request(self, *, takes_relays: bool = False) -> TransferRequest:
        return TransferRequest(
            model=self.model,
            revision=self.revision,
            weight_version=self.weight_version,
            target_instance=self.target.instance_id,
            target_epoch=self.target.epoch,
            ranks=tuple((rank.rank, rank.generation) for rank in self.target.ranks),
            topology=self.topology.to_topology(),
            deadline_s=self.deadline_s,
            max_sources=self.max_sources,
            relay=self.relay,
            takes_relays=takes_relays,
        )


class SourceGrant(_Answer):
    instance_id: str
    epoch: int
    rank: int
    generation: int
    url: str
    weight_version: int
    manifest_digest: str
    ticket: str
    relay: bool = Field(description="it is still receiving what it serves, or was when this was granted")
    standby: int = Field(description="tier: to be read once the sources of all lower tiers are given up")
    certificate_sha256: str | None = Field(description="of the certificate to be met at url; null: any that is trusted")


class RankGrant(_Answer):
    rank: int
    sources: list[SourceGrant]


class ReasonAnswer(_Answer):
    instance_id: str
    reason: str

    @classmethod
    def of(cls, reason: Reason) -> ReasonAnswer:
        return cls(instance_id=reason.instance_id, reason=reason.reason)


class GrantAnswer(_Answer):
    transfer_id: str
    state: TransferState
    model: str
    revision: str | None
    weight_version: int | None
    created_at: datetime
    deadline_at: datetime
    ranks: list[RankGrant]
    reasons: list[ReasonAnswer] = Field(description="why the other instances of the model were not taken")


class ErrorAnswer(_Answer):
    code: str
    detail: str


class ErrorBody(_Request):
    code: Annotated[str, Field(min_length=1, max_length=64)]
    detail: Annotated[str, Field(max_length=65536)]


class SourceBytesBody(_Request):
    instance_id: Name
    rank: Whole
    bytes: Whole


class FailureBody(_Request):
    """A source rank that the target has given up, told once, when it happens."""

    instance_id: Name
    rank: Whole
    generation: Whole
    code: Annotated[str, Field(min_length=1, max_length=64)]
    detail: Annotated[str, Field(max_length=4096)]


class ProgressBody(_Request):
    generation: Whole
    state: TransferState
    bytes_total: Whole
    bytes_peer: Whole
    bytes_disk: Whole
    error: ErrorBody | None = None
    sources: Annotated[list[SourceBytesBody], Field(max_length=65536)] = []
    failures: Annotated[list[FailureBody], Field(max_length=65536)] = []

    def to_failures(self) -> tuple[ReportedFailure, ...]:
        return tuple(
            ReportedFailure(
                instance_id=f.instance_id, rank=f.rank, generation=f.generation, code=f.code, detail=f.detail
            )
            for f in self.failures
        )

    def to_progress(self) -> RankProgress:
        return RankProgress(
            state=self.state,
            bytes_total=self.bytes_total,
            bytes_peer=self.bytes_peer,
            bytes_disk=self.bytes_disk,
            error_code=self.error.code if self.error else None,
            error_detail=self.error.detail if self.error else None,
        )

    def to_source_bytes(self) -> tuple[SourceBytes, ...]:
        return tuple(SourceBytes(instance_id=s.instance_id, rank=s.rank, nbytes=s.bytes) for s in self.sources)


class ProgressAnswer(_Answer):
    state: TransferState = Field(description="of the transfer, so that the target learns of a cancel or a deadline")
    error: ErrorAnswer | None


class TransfersQuery(_Request):
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class RankAnswer(_Answer):
    rank: int
    state: TransferState
    bytes_total: int
    bytes_peer: int
    bytes_disk: int
    rate_bytes_per_s: float | None
    eta_s: float | None
    error: ErrorAnswer | None


class TransferSource(_Answer):
    """A source rank that every target rank may read from."""

    instance_id: str
    epoch: int
    rank: int
    generation: int
    url: str
    weight_version: int
    manifest_digest: str
    relay: bool = Field(description="it was still receiving itself when this was granted")
    standby: int = Field(description="tier: read once the sources of all lower tiers are given up")
    bytes: int = Field(description="that all target ranks have read from it")
    bytes_per_target_rank: dict[int, int] = Field(description="of those that have read from it")


class TransferAnswer(_Answer):
    """A transfer; rates are means since the grant, bytes are shell bytes by where they came from."""

    transfer_id: str
    state: TransferState
    model: str
    revision: str | None
    weight_version: int | None
    target_instance_id: str
    created_at: datetime
    deadline_at: datetime
    ended_at: datetime | None
    seconds: float
    bytes_total: int
    bytes_peer: int
    bytes_disk: int
    rate_bytes_per_s: float | None
    eta_s: float | None
    ranks: list[RankAnswer]
    sources: list[TransferSource]
    reasons: list[ReasonAnswer]
    error: ErrorAnswer | None

    @classmethod
    def of(cls, transfer: Transfer, *, now: float) -> TransferAnswer:
        progress = transfer.session.ranks.values()
        total = sum(rank.bytes_total for rank in progress)
        done = sum(map(bytes_done, progress))
        seconds = transfer.seconds(now)
        rate = Rate.of(done=done, total=total, seconds=seconds, is_final=transfer.state.is_final)
        return cls(
            transfer_id=transfer.transfer_id,
            state=transfer.state,
            model=transfer.model,
            revision=transfer.revision,
            weight_version=transfer.weight_version,
            target_instance_id=transfer.target_instance,
            created_at=instant(transfer.created_at),
            deadline_at=instant(transfer.deadline_at),
            ended_at=None if transfer.ended_at is None else instant(transfer.ended_at),
            seconds=seconds,
            bytes_total=total,
            bytes_peer=sum(rank.bytes_peer for rank in progress),
            bytes_disk=sum(rank.bytes_disk for rank in progress),
            rate_bytes_per_s=rate.bytes_per_s,
            eta_s=rate.eta_s,
            ranks=[_rank_answer(rank, transfer, seconds) for rank in sorted(transfer.session.ranks)],
            sources=[
                _transfer_source(transfer, instance, source)
                for instance in transfer.instances
                for source in instance.ranks
            ],
            reasons=[ReasonAnswer.of(reason) for reason in transfer.reasons],
            error=error_answer(transfer.session.error_code, transfer.session.error_detail),
        )


class PlanBody(_Request):
    """A dry run of a transfer."""

    model: Name
    revision: Name | None = None
    weight_version: Whole | None = None
    topology: TopologyBody = TopologyBody()
    manifest: list[dict[str, object]] | None = Field(
        default=None,
        description="of the target ranks to plan for; null plans for the layout of the best source, which then has to "
        "be of this topology",
    )
    exclude_instance: Name | None = None
    max_sources: MaxSources = 8

    def to_want(self) -> Want:
        return Want(
            model=self.model,
            revision=self.revision,
            weight_version=self.weight_version,
            topology=self.topology.to_topology(),
            exclude_instance=self.exclude_instance,
            max_sources=self.max_sources,
        )


class WayCounts(_Answer):
    """Tensors by how they would be filled."""

    identical: int = 0
    reshard: int = 0
    disk: int = 0
    constant: int = 0


class SourceRankName(_Answer):
    instance_id: str
    rank: int


class TensorAnswer(_Answer):
    """A tensor of one target rank."""

    rank: int
    name: str
    way: Way
    bytes: int
    reason: str
    sources: list[SourceRankName] = Field(description="that give some of it, the best holder of each manifest")


class PlanSource(_Answer):
    """A source rank, and what it would send to all target ranks; those that hold one manifest send equal parts."""

    instance_id: str
    rank: int
    manifest_digest: str
    bytes: int


class UncoveredAnswer(_Answer):
    """Elements that no source gives, and of which it is not known where they lie in the checkpoint."""

    rank: int
    tensor: str
    elements: int


class OpaqueAnswer(_Answer):
    tensor: str
    reason: str


class PlanAnswer(_Answer):
    """What a transfer would do. Placements come with the manifests, so nothing is traced, or opaque, here."""

    revision: str | None
    weight_version: int | None
    seconds_trace: float = 0.0
    seconds_plan: float
    copies: int
    segments: int
    bytes: int
    ways: WayCounts
    bytes_per_source_rank: dict[int, int] = Field(description="by number of the rank, over all source instances")
    bytes_per_target_rank: dict[int, int]
    uncovered: list[UncoveredAnswer] = []
    opaque: list[OpaqueAnswer] = []
    tensors: list[TensorAnswer]
    sources: list[PlanSource]
    reasons: list[ReasonAnswer]
    error: ErrorAnswer | None = None

    @classmethod
    def of(cls, plan: DryRun) -> PlanAnswer:
        sent = plan.source_bytes
        return cls(
            revision=plan.revision,
            weight_version=plan.weight_version,
            seconds_plan=plan.seconds,
            copies=plan.copies,
            segments=plan.copies,
            bytes=sum(rank.nbytes for rank in plan.ranks),
            ways=WayCounts(
                identical=plan.ways["identical"],
                reshard=plan.ways["reshard"],
                disk=plan.ways["disk"],
                constant=plan.ways["constant"],
            ),
            bytes_per_source_rank=_by_rank(plan, sent),
            bytes_per_target_rank={rank.rank: rank.nbytes for rank in plan.ranks},
            uncovered=[
                UncoveredAnswer(rank=rank.rank, tensor=name, elements=elements)
                for rank in plan.ranks
                for name, elements in rank.uncovered.items()
            ],
            tensors=[_tensor_answer(rank, way) for rank in plan.ranks for way in rank.plan.ways],
            sources=[
                PlanSource(
                    instance_id=source.instance_id,
                    rank=source.rank,
                    manifest_digest=source.manifest_digest,
                    bytes=sent[source.key],
                )
                for instance in plan.sources
                for source in instance.ranks
            ],
            reasons=[ReasonAnswer.of(reason) for reason in plan.reasons],
        )


class Problem(BaseModel):
    """RFC 9457; facts of the error are further members."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    code: str


PROBLEMS: dict[int | str, dict[str, object]] = {
    "default": {"model": Problem, "description": "A problem document (RFC 9457) with a stable `code`"},
    422: {"model": Problem, "description": "The request cannot be right"},
}


def instant(seconds: float) -> datetime:
    """Seconds since 1970 as a point in time; RFC 3339 in JSON."""
    return datetime.fromtimestamp(seconds, UTC)


def to_manifest(value: dict[str, object]) -> Manifest:
    """The manifest that a JSON object describes; may take a while.

    Raises:
        ManifestError: If it describes none.
    """
    return Manifest.from_text(json.dumps(value).encode())


def base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def publication_answer(process: RankProcess) -> PublicationAnswer | None:
    if process.publication is None:
        return None
    return PublicationAnswer(
        weight_version=process.publication.weight_version, manifest_digest=process.publication.digest
    )


def error_answer(code: str | None, detail: str | None) -> ErrorAnswer | None:
    return None if code is None else ErrorAnswer(code=code, detail=detail or "")


def _tensor_answer(rank: RankPlan, way: TensorWay) -> TensorAnswer:
    return TensorAnswer(
        rank=rank.rank,
        name=way.name,
        way=way.way,
        bytes=way.nbytes,
        reason=way.reason,
        sources=[SourceRankName(instance_id=name, rank=number) for name, number in rank.sources_of(way)],
    )


def _by_rank(plan: DryRun, sent: Mapping[SourceKey, int]) -> dict[int, int]:
    found = {source.rank: 0 for instance in plan.sources for source in instance.ranks}
    for (_, rank), nbytes in sent.items():
        found[rank] += nbytes
    return dict(sorted(found.items()))


def _state(instance: Instance, verdict: Verdict | None, now: float) -> tuple[InstanceState, str | None]:
    """State and reason as others see them: one that could serve may be in quarantine."""
    if verdict is not None and instance.state(now) is InstanceState.READY:
        return InstanceState.QUARANTINED, verdict.reason
    return instance.state(now), instance.why_no_source(now)


def _instance_rank(process: RankProcess, now: float) -> InstanceRank:
    return InstanceRank(
        rank=process.rank,
        generation=process.generation,
        url=process.url,
        certificate_sha256=process.certificate_sha256,
        live=process.is_live(now),
        expires_at=instant(process.expires_at),
        published=publication_answer(process),
    )


def _source_rank(process: RankProcess) -> SourceRank:
    return SourceRank(
        rank=process.rank,
        url=process.url,
        generation=process.generation,
        manifest_digest=process.publication.digest if process.publication else None,
        bytes=process.publication.nbytes if process.publication else None,
    )


def _rank_answer(rank: int, transfer: Transfer, seconds: float) -> RankAnswer:
    progress = transfer.session.ranks[rank]
    rate = Rate.of(
        done=bytes_done(progress),
        total=progress.bytes_total,
        seconds=seconds,
        is_final=progress.state.is_final or transfer.state.is_final,
    )
    return RankAnswer(
        rank=rank,
        state=transfer.session.state_of(rank),
        bytes_total=progress.bytes_total,
        bytes_peer=progress.bytes_peer,
        bytes_disk=progress.bytes_disk,
        rate_bytes_per_s=rate.bytes_per_s,
        eta_s=rate.eta_s,
        error=error_answer(progress.error_code, progress.error_detail),
    )


def _transfer_source(transfer: Transfer, instance: GrantedInstance, source: GrantedSource) -> TransferSource:
    read = {rank.rank: nbytes for rank in transfer.ranks if (nbytes := rank.nbytes_from(source))}
    return TransferSource(
        instance_id=source.instance_id,
        epoch=source.epoch,
        rank=source.rank,
        generation=source.generation,
        url=source.url,
        weight_version=source.weight_version,
        manifest_digest=source.manifest_digest,
        relay=instance.relay,
        standby=instance.standby,
        bytes=sum(read.values()),
        bytes_per_target_rank=read,
    )
