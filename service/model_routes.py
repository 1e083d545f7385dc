"""Models: who serves them, and what a transfer of them would do."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Query, Request

from weightwire.service.components import Components, Parts
from weightwire.service.instances import InstanceState
from weightwire.service.large_bodies import large_body_schema, read_large_body
from weightwire.service.paths import ModelId
from weightwire.service.schemas import (
    PROBLEMS,
    ModelAnswer,
    PlanAnswer,
    PlanBody,
    SourceAnswer,
    SourcesQuery,
    to_manifest,
)

router = APIRouter(prefix="/v1", tags=["models"], responses=PROBLEMS)


@router.get("/models", summary="Models that instances have registered")
def list_models(parts: Parts) -> list[ModelAnswer]:
    now = parts.clock()
    instances = parts.registry.instances()
    known = Counter(instance.model for instance in instances)
    ready = Counter(instance.model for instance in instances if instance.state(now) is InstanceState.READY)
    return [ModelAnswer(model=model, instances=known[model], ready=ready[model]) for model in sorted(known)]


@router.get("/models/{model:segment}/sources", summary="Who can serve a model, in which revision, version and state")
def list_sources(
    model: ModelId,
    query: Annotated[SourcesQuery, Query()],
    parts: Parts,
) -> list[SourceAnswer]:
    now = parts.clock()
    readers, verdicts = parts.transfers.active_readers(), parts.transfers.verdicts()
    return [
        SourceAnswer.of(
            instance,
            active_readers=readers[instance.instance_id],
            verdict=verdicts.get(instance.instance_id),
            now=now,
        )
        for instance in parts.registry.instances(model=model)
        if query.revision in (None, instance.revision)
    ]


@router.post(
    "/plans",
    summary="Dry run: which bytes a transfer would take from where, and why; the body may be gzip",
    openapi_extra=large_body_schema(PlanBody),
)
async def plan(request: Request, parts: Parts) -> PlanAnswer:
    body = await read_large_body(request, PlanBody, parts)
    return await anyio.to_thread.run_sync(_plan, body, parts, limiter=parts.heavy_work)


def _plan(body: PlanBody, parts: Components) -> PlanAnswer:
    targets = None if body.manifest is None else [to_manifest(value) for value in body.manifest]
    return PlanAnswer.of(parts.planner.dry_run(body.to_want(), targets))
