"""Instances and what they publish."""

from __future__ import annotations

import gzip
from importlib.metadata import version
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Query, Request, Response

from weightwire.service.components import Components, Parts
from weightwire.service.instances import Instance
from weightwire.service.large_bodies import large_body_schema, read_large_body
from weightwire.service.paths import InstanceId, RankNumber
from weightwire.service.schemas import (
    PROBLEMS,
    InstanceAnswer,
    LeaveQuery,
    LimitsAnswer,
    LimitsBody,
    PublishBody,
    Published,
    RegisterBody,
    Registered,
    RegisteredRank,
    base64url,
    instant,
    publication_answer,
)

router = APIRouter(prefix="/v1", tags=["instances"], responses=PROBLEMS)


@router.put("/instances/{instance_id:segment}", summary="Register an instance or some of its ranks, or renew leases")
def register(instance_id: InstanceId, body: RegisterBody, request: Request, parts: Parts) -> Registered:
    peer_host = request.client.host if request.client else None
    instance = parts.registry.register(body.to_registration(instance_id, peer_host=peer_host))
    return _registered(instance, body, parts)


@router.get("/instances", summary="All instances that are known, with their leases")
def list_instances(parts: Parts) -> list[InstanceAnswer]:
    now, verdicts = parts.clock(), parts.transfers.verdicts()
    return [
        InstanceAnswer.of(instance, verdict=verdicts.get(instance.instance_id), now=now)
        for instance in parts.registry.instances()
    ]


@router.get("/instances/{instance_id:segment}", summary="One instance, with its leases")
def get_instance(instance_id: InstanceId, parts: Parts) -> InstanceAnswer:
    verdict = parts.transfers.verdicts().get(instance_id)
    return InstanceAnswer.of(parts.registry.instance(instance_id), verdict=verdict, now=parts.clock())


@router.get("/instances/{instance_id:segment}/limits", summary="What was set at run time")
def get_limits(instance_id: InstanceId, parts: Parts) -> LimitsAnswer:
    return LimitsAnswer.of(parts.registry.instance(instance_id).limits)


@router.put(
    "/instances/{instance_id:segment}/limits",
    summary="Set how many readers and bytes per second it serves, from its next renewal on",
)
def set_limits(instance_id: InstanceId, body: LimitsBody, parts: Parts) -> LimitsAnswer:
    return LimitsAnswer.of(parts.registry.set_limits(instance_id, body.to_overrides()).limits)


@router.delete("/instances/{instance_id:segment}", status_code=204, summary="Take an instance, or a rank of it, out")
def leave(instance_id: InstanceId, query: Annotated[LeaveQuery, Query()], parts: Parts) -> None:
    parts.registry.leave(instance_id, epoch=query.epoch, rank=query.rank, generation=query.generation)


@router.put(
    "/instances/{instance_id:segment}/ranks/{rank}/manifest",
    summary="Publish what a rank holds; the body may be gzip",
    openapi_extra=large_body_schema(PublishBody),
)
async def publish(instance_id: InstanceId, rank: RankNumber, request: Request, parts: Parts) -> Published:
    body = await read_large_body(request, PublishBody, parts)
    return await anyio.to_thread.run_sync(_publish, instance_id, rank, body, parts, limiter=parts.heavy_work)


@router.get("/manifests/{digest}", summary="The canonical text of a manifest, as its digest covers it", tags=["models"])
def get_manifest(digest: str, request: Request, parts: Parts) -> Response:
    blob = parts.manifests.packed_text(digest)
    headers = {
        "ETag": f'"{digest}"',
        "Vary": "Accept-Encoding",
        "Cache-Control": "private, max-age=31536000, immutable",
    }
    if digest in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if _accepts_gzip(request.headers.get("accept-encoding", "")):
        return Response(blob, media_type="application/json", headers={**headers, "Content-Encoding": "gzip"})
    return Response(gzip.decompress(blob), media_type="application/json", headers=headers)


def _publish(instance_id: str, rank: int, body: PublishBody, parts: Components) -> Published:
    stored = parts.registry.publish(instance_id, rank, body.to_announcement())
    return Published(digest=body.digest, stored=stored)


def _registered(instance: Instance, body: RegisterBody, parts: Components) -> Registered:
    """The answer to a registration: of the ranks that the caller spoke for, and no others."""
    processes = [instance.ranks[claim.rank] for claim in body.ranks]
    return Registered(
        instance_id=instance.instance_id,
        epoch=instance.epoch,
        lease_s=processes[0].lease_s,
        expires_at=instant(min(process.expires_at for process in processes)),
        ranks=[
            RegisteredRank(
                rank=process.rank,
                generation=process.generation,
                ticket_key=base64url(parts.registry.source_key(instance.instance_id, process)),
                expires_at=instant(process.expires_at),
                published=publication_answer(process),
            )
            for process in processes
        ],
        read_token_sha256=parts.guard.token_digests,
        limits=LimitsAnswer.of(instance.limits),
        service_version=version("weightwire"),
    )


def _accepts_gzip(header: str) -> bool:
    """True if Accept-Encoding names gzip (or everything) with a weight other than 0."""
    for item in header.lower().split(","):
        name, _, weight = item.partition(";")
        if name.strip() in ("gzip", "*") and weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000"):
            return True
    return False
