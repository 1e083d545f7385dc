"""The control plane's REST API as Python calls, blocking."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Literal, Self, TypeAlias, cast
from urllib.parse import quote

import httpx

from weightwire.transfer.address import Address
from weightwire.transfer.errors import (
    NotFoundError,
    ServiceUnreachableError,
    ServiceUntrustedError,
    SettingsError,
    SourceRefusedError,
    TransferError,
    VersionSkewError,
)
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.problems import error_of, refusal_of
from weightwire.transfer.session import RankProgress
from weightwire.transfer.wire.framing import PROTOCOL, understands_waits
from weightwire.transfer.wire.limits import LimitOverrides
from weightwire.transfer.wire.proxies import Proxies, travels_in_clear
from weightwire.transfer.wire.source import Access
from weightwire.transfer.wire.stream import Endpoint
from weightwire.transfer.wire.trust import client_context, refused_certificate

Json: TypeAlias = dict[str, object]

# A gateway's own page with one of these says that nobody is behind it.
_GATEWAY_STATUSES = (502, 503, 504)
# What the service takes of the reason for a failure.
_MOST_DETAIL_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBinding:
    """One rank process that speaks for itself.

    Attributes:
        url: Of its data plane; None while it only takes.
        epoch: Of its instance; the generation of a single process unless several processes agreed on one.
        certificate_sha256: Fingerprint of the certificate that is met at an https `url`: targets take no other, and
            need no authority. None leaves it to authorities.
    """

    instance_id: str
    generation: int
    rank: int = 0
    url: str | None = None
    epoch: int | None = None
    certificate_sha256: str | None = None

    @property
    def instance_epoch(self) -> int:
        return self.generation if self.epoch is None else self.epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What a registration gives.

    Attributes:
        lease_s: Register again within this time.
        access: For the source's server.
        published: Digest that the service has on record for this rank; None: publish, or publish again.
        limits: What is set at run time for the process.
    """

    lease_s: float
    access: Access
    published: str | None
    limits: LimitOverrides = field(default_factory=LimitOverrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFailure:
    """A source rank that a target gave up, and why.

    Attributes:
        generation: Of the source, as granted.
    """

    instance_id: str
    rank: int
    generation: int
    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A transfer that the service granted, to one target rank or to several.

    Attributes:
        ranks: For each target rank all ranks of all source instances, in order of preference, each with its ticket.
        reasons: Why other instances of the model were not taken, by instance.
    """

    transfer_id: str
    deadline_at: str
    ranks: Mapping[int, tuple[Endpoint, ...]]
    reasons: Mapping[str, str]

    @property
    def sources(self) -> tuple[Endpoint, ...]:
        """What all target ranks were granted, rank by rank."""
        return tuple(source for sources in self.ranks.values() for source in sources)


class ServiceClient:
    """One connection pool to the service. Threads may share it.

    Proxy variables of the environment are not looked at unless `proxies` were made of them: these calls stay inside
    the cluster.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        allow_plain_http: bool = False,
        tls: ssl.SSLContext | None = None,
        proxies: Proxies | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """Args:
        url: `http://host:port` of the service.
        token: Bearer token.
        allow_plain_http: Send the token unencrypted beyond loopback.
        tls: Trust for https; see `transfer.wire.trust.client_context`.
        proxies: Which proxy leads to the service; none by default.
        timeout_s: For a call to connect, and for each of its reads and writes.

        Raises:
            SettingsError: If the token would travel unencrypted.
            RequestError: If `url` is not an address.
        """
        address = Address.parse(url)
        if token and address.scheme == "http" and not address.is_loopback and not allow_plain_http:
            raise SettingsError(
                f"service {url}: the token would travel unencrypted, expected https or --allow-plain-http"
            )
        proxy = proxies.leading_to(address) if proxies else None
        # Also without a token: what comes back holds tickets.
        if travels_in_clear(address, proxy) and not allow_plain_http:
            raise SettingsError(
                f"service {url}: tickets would travel unencrypted through {proxy}, expected https or --allow-plain-http"
            )
        self.url = str(address)
        # An older service refuses fields that it does not know.
        self._spoken = ""
        self._name = f"service {address}" + (f" through {proxy}" if proxy else "")
        headers = {"Weightwire-Protocol": PROTOCOL} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
            verify=tls or client_context(),
            proxy=httpx.Proxy(str(proxy.address), auth=proxy.user) if proxy else None,
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- instances -------------------------------------------------------------------------------------------

    def register(
        self,
        binding: RankBinding,
        *,
        model: str,
        revision: str | None,
        topology: Topology,
        lease_s: float | None = None,
    ) -> Lease:
        """Register one rank, or renew its lease.

        Raises:
            ConflictError: If a newer process of this instance is registered.
            ServiceUnreachableError: If the service does not answer.
        """
        leases = self.register_ranks([binding], model=model, revision=revision, topology=topology, lease_s=lease_s)
        return leases[binding.rank]

    def register_ranks(
        self,
        bindings: Sequence[RankBinding],
        *,
        model: str,
        revision: str | None,
        topology: Topology,
        lease_s: float | None = None,
        limits: LimitOverrides | None = None,
    ) -> dict[int, Lease]:
        """Register all ranks that one process speaks for, or renew their leases: all or none.

        Args:
            limits: As the service told them last, in case that it forgot; left out if it never told any.

        Returns:
            Their leases, by rank.

        Raises:
            ValueError: If there is no binding, or they are not of one instance and epoch.
            ConflictError: If a newer process of this instance is registered, or speaks for one of the ranks.
            ServiceUnreachableError: If the service does not answer.
        """
        first = _first_of_one_instance(bindings)
        body: Json = {
            "model": model,
            "revision": revision or None,
            "epoch": first.instance_epoch,
            "topology": _sizes(topology),
            "ranks": [_claim(binding) for binding in bindings],
            "lease_s": lease_s,
        }
        if limits not in (None, LimitOverrides()):
            body["limits"] = asdict(limits)
        answer = self._call("PUT", f"/v1/instances/{_segment(first.instance_id)}", body)
        return {int(cast(int, rank["rank"])): _lease(answer, rank) for rank in _items(answer, "ranks")}

    def limits(self, instance_id: str) -> LimitOverrides:
        """What is set at run time for an instance.

        Raises:
            NotFoundError: If it is not registered.
        """
        return _overrides(self._call("GET", f"/v1/instances/{_segment(instance_id)}/limits"))

    def set_limits(self, instance_id: str, limits: LimitOverrides) -> LimitOverrides:
        """Set what an instance gives at most: each of its processes keeps that from its next renewal on.

        Raises:
            NotFoundError: If it is not registered.
            RequestError: If it is a rate that looks like a dead source.
        """
        return _overrides(self._call("PUT", f"/v1/instances/{_segment(instance_id)}/limits", asdict(limits)))

    def leave(self, binding: RankBinding) -> None:
        """Take one rank out of the matching at once; no error if it is not known."""
        params = {"epoch": binding.instance_epoch, "rank": binding.rank, "generation": binding.generation}
        with contextlib.suppress(NotFoundError):
            self._call("DELETE", f"/v1/instances/{_segment(binding.instance_id)}", params=params)

    def publish(self, binding: RankBinding, manifest: Manifest, *, weight_version: int) -> None:
        """Say what a rank holds; the manifest itself is sent only if the service does not have it."""
        body: Json = {
            "epoch": binding.instance_epoch,
            "generation": binding.generation,
            "weight_version": weight_version,
            "digest": manifest.digest,
            "manifest": None,
        }
        path = f"/v1/instances/{_segment(binding.instance_id)}/ranks/{binding.rank}/manifest"
        try:
            self._call("PUT", path, body)
        except NotFoundError as error:
            if error.facts.get("kind") != "manifest":
                raise
            # The canonical text goes in as it is, so that nothing on the way can spell it otherwise.
            head, _, tail = json.dumps({**body, "manifest": 0}).encode().partition(b'"manifest": 0')
            self._call("PUT", path, raw=gzip.compress(head + b'"manifest": ' + manifest.text + tail, compresslevel=1))

    def manifest(self, digest: str) -> Manifest:
        """Fetch a manifest by its address, and check that it has it.

        Raises:
            NotFoundError: If the service does not have it.
            ManifestError: If the bytes are not those of the digest.
        """
        with self._as_ours():
            response = self._http.get(f"/v1/manifests/{digest}")
            self._check(response)
            return Manifest.from_text(response.content, digest=digest)

    def instances(self) -> list[Json]:
        return self._list("/v1/instances")

    def sources(self, model: str, *, revision: str | None = None) -> list[Json]:
        """Who can serve a model, in which version and state."""
        return self._list(f"/v1/models/{_segment(model)}/sources", params={"revision": revision} if revision else None)

    # -- transfers -------------------------------------------------------------------------------------------

    def plan(
        self,
        model: str,
        *,
        revision: str | None = None,
        topology: Topology | None = None,
        manifests: Sequence[Manifest] = (),
    ) -> Json:
        """A dry run: what would move if a target asked now.

        Args:
            topology: Of the target; by default that of the manifests, or one rank.
            manifests: Of the target ranks to plan for; without any, for the layout of a source of that topology.

        Raises:
            NotFoundError: If there is neither a source nor a manifest.
            RequestError: If there is no manifest, and the best source has another topology.
            ManifestMismatchError: If a source and a target cannot be of one model.
        """
        if topology is None:
            topology = manifests[0].topology if manifests else Topology()
        body = {
            "model": model,
            "revision": revision or None,
            "topology": _sizes(topology),
            "manifest": [json.loads(manifest.text) for manifest in manifests] or None,
        }
        return self._call("POST", "/v1/plans", body)

    def create_transfer(
        self,
        bindings: RankBinding | Sequence[RankBinding],
        *,
        model: str,
        revision: str | None,
        topology: Topology | None = None,
        weight_version: int | None = None,
        deadline_s: float,
        relay: bool = False,
        idempotency_key: str | None = None,
    ) -> Grant:
        """Ask for one transfer into registered ranks of one instance: it is ready when all of them are.

        Args:
            bindings: One, or one for each rank that takes.
            topology: Of the target, as registered; one rank by default. Sources may have another one.
            relay: Whether the target serves what it has verified while it receives the rest.

        Raises:
            ValueError: If there is no binding, or they are not of one instance and epoch.
            NotFoundError: If the target is not registered.
            ConflictError: If it is registered as something else, or the idempotency key was used for another request.
        """
        targets = (bindings,) if isinstance(bindings, RankBinding) else tuple(bindings)
        first = _first_of_one_instance(targets)
        body: Json = {
            "model": model,
            "revision": revision or None,
            "weight_version": weight_version,
            "target": {
                "instance_id": first.instance_id,
                "epoch": first.instance_epoch,
                "ranks": [{"rank": target.rank, "generation": target.generation} for target in targets],
            },
            "topology": _sizes(topology or Topology()),
            "deadline_s": deadline_s,
        }
        if relay and understands_waits(self._spoken):
            body["relay"] = True
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        answer = self._call("POST", "/v1/transfers", body, headers=headers)
        granted = {rank["rank"]: _items(rank, "sources") for rank in _items(answer, "ranks")}
        return Grant(
            transfer_id=str(answer["transfer_id"]),
            deadline_at=str(answer["deadline_at"]),
            ranks={
                target.rank: tuple(_endpoint(source, target) for source in granted[target.rank]) for target in targets
            },
            reasons={str(item["instance_id"]): str(item["reason"]) for item in _items(answer, "reasons")},
        )

    def transfer(self, transfer_id: str) -> Json:
        return self._call("GET", f"/v1/transfers/{_segment(transfer_id)}")

    def transfers(self) -> list[Json]:
        return self._list("/v1/transfers")

    def cancel(self, transfer_id: str) -> Json:
        """Stop a transfer; one that ended stays as it is."""
        return self._call("DELETE", f"/v1/transfers/{_segment(transfer_id)}")

    def report(
        self,
        transfer_id: str,
        binding: RankBinding,
        progress: RankProgress,
        *,
        sources: Sequence[tuple[str, int, int]] = (),
        failures: Sequence[ReportedFailure] = (),
    ) -> TransferError | None:
        """Report a rank's progress.

        Args:
            sources: Bytes by source, as (instance, rank, bytes).
            failures: Sources that it gave up since the last report.

        Returns:
            Why the transfer has ended, if it has, and not well: it was cancelled, or its deadline passed.
        """
        error = {"code": progress.error_code, "detail": progress.error_detail or ""} if progress.error_code else None
        body: Json = {
            "generation": binding.generation,
            "state": str(progress.state),
            "bytes_total": progress.bytes_total,
            "bytes_peer": progress.bytes_peer,
            "bytes_disk": progress.bytes_disk,
            "error": error,
            "sources": [{"instance_id": name, "rank": rank, "bytes": nbytes} for name, rank, nbytes in sources],
        }
        # A service that does not know the field would refuse all of it.
        if failures:
            body["failures"] = [
                asdict(replace(failure, detail=failure.detail[:_MOST_DETAIL_CHARS])) for failure in failures
            ]
        path = f"/v1/transfers/{_segment(transfer_id)}/ranks/{binding.rank}/progress"
        ended = self._call("POST", path, body)["error"]
        return None if ended is None else error_of(cast(Json, ended))

    def events(self, transfer_id: str) -> Iterator[Json]:
        """Follow a transfer until it ends: its object at every change, as the service streams it."""
        path = f"/v1/transfers/{_segment(transfer_id)}/events"
        with self._as_ours(), self._http.stream("GET", path, headers={"Accept": "text/event-stream"}) as response:
            if response.status_code != 200:
                response.read()
                self._check(response)
            for line in response.iter_lines():
                if line.startswith("data:"):
                    yield json.loads(line.removeprefix("data:"))

    # -- HTTP ------------------------------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        params: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        headers = dict(headers or {})
        content = raw
        if raw is not None:
            headers |= {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        elif body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body).encode()
        with self._as_ours():
            response = self._http.request(method, path, content=content, params=params, headers=headers)
            self._check(response)
            return cast(Json, response.json()) if response.content else {}

    def _list(self, path: str, params: Mapping[str, str] | None = None) -> list[Json]:
        with self._as_ours():
            response = self._http.get(path, params=params)
            self._check(response)
            return cast("list[Json]", response.json())

    def _check(self, response: httpx.Response) -> None:
        self._spoken = spoken = response.headers.get("weightwire-protocol", "")
        if response.is_success and spoken.partition(".")[0] == PROTOCOL.partition(".")[0]:
            return
        if response.is_success and spoken:
            raise VersionSkewError(f"service {self.url}: speaks protocol {spoken!r}, this side {PROTOCOL}")
        error = refusal_of(
            status=response.status_code,
            body=response.content,
            content_type=response.headers.get("content-type", ""),
            url=str(response.request.url.copy_with(query=None)),
        )
        if isinstance(error, SourceRefusedError) and response.status_code in _GATEWAY_STATUSES:
            raise ServiceUnreachableError(str(error), url=self.url) from error
        raise error

    @contextlib.contextmanager
    def _as_ours(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            if reason := refused_certificate(error):
                raise ServiceUntrustedError(f"{self._name}: {reason}", url=self.url) from error
            raise ServiceUnreachableError(
                f"{self._name}: {str(error) or type(error).__name__}", url=self.url
            ) from error
        except ValueError as error:
            raise TransferError(f"service {self.url}: answered with something else than JSON: {error}") from error


def _first_of_one_instance(bindings: Sequence[RankBinding]) -> RankBinding:
    """The first of the bindings, which all have to speak of one instance and epoch."""
    named = sorted({(binding.instance_id, binding.instance_epoch) for binding in bindings})
    if len(named) != 1:
        raise ValueError(f"bindings: speak of the instances and epochs {named}, expected exactly one")
    return bindings[0]


def _claim(binding: RankBinding) -> Json:
    claim: Json = {"rank": binding.rank, "generation": binding.generation, "url": binding.url}
    # Left out where there is none: a service of protocol 1.0 refuses a field that it does not know.
    if binding.certificate_sha256 is not None:
        claim["certificate_sha256"] = binding.certificate_sha256
    return claim


def _sizes(topology: Topology) -> Json:
    return {"tp": topology.tp, "pp": topology.pp, "ep": topology.ep}


def _lease(answer: Json, rank: Json) -> Lease:
    published = cast("Json | None", rank.get("published"))
    return Lease(
        lease_s=float(cast(float, answer["lease_s"])),
        access=Access(
            ticket_key=_base64url(str(rank["ticket_key"])),
            read_token_sha256=frozenset(map(str, cast("list[object]", answer["read_token_sha256"]))),
        ),
        published=None if published is None else str(published["manifest_digest"]),
        limits=_overrides(cast(Json, answer.get("limits") or {})),
    )


def _overrides(answer: Json) -> LimitOverrides:
    return LimitOverrides(
        max_readers=cast("int | None", answer.get("max_readers")),
        max_bytes_per_s=cast('int | Literal["unlimited"] | None', answer.get("max_bytes_per_s")),
    )


def _endpoint(source: Json, target: RankBinding) -> Endpoint:
    return Endpoint(
        instance_id=str(source["instance_id"]),
        rank=int(cast(int, source["rank"])),
        generation=int(cast(int, source["generation"])),
        weight_version=int(cast(int, source["weight_version"])),
        url=str(source["url"]),
        manifest=str(source["manifest_digest"]),
        ticket=str(source["ticket"]),
        target_instance=target.instance_id,
        target_rank=target.rank,
        relay=bool(source.get("relay", False)),
        standby=int(cast(int, source.get("standby", 0))),
        certificate_sha256=cast("str | None", source.get("certificate_sha256")),
    )


def _items(value: Json, key: str) -> list[Json]:
    return cast("list[Json]", value[key])


def _segment(name: str) -> str:
    return quote(name, safe="")


def _base64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
