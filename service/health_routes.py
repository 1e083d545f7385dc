"""What probes and Prometheus ask."""

from __future__ import annotations

import anyio
import anyio.to_thread
from fastapi import APIRouter, Response
from pydantic import BaseModel

from weightwire.service.components import Components, Parts
from weightwire.transfer.errors import TransferError

router = APIRouter(tags=["health"])
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Live(BaseModel):
    live: bool = True


class Ready(BaseModel):
    ready: bool
    reason: str | None = None


@router.get("/healthz", summary="The process is alive; asks nothing else")
async def healthz() -> Live:
    return Live()


@router.get("/readyz", summary="The store works, and the service is not stopping", responses={503: {"model": Ready}})
async def readyz(response: Response, parts: Parts) -> Ready:
    reason = await _why_not_ready(parts)
    if reason is not None:
        response.status_code = 503
    return Ready(ready=reason is None, reason=reason)


@router.get("/metrics", summary="Metrics in Prometheus' text format", response_class=Response)
def metrics(parts: Parts) -> Response:
    return Response(parts.metrics.text(), media_type=_METRICS_TYPE)


async def _why_not_ready(parts: Components) -> str | None:
    if parts.changes.closed:
        return "the service is stopping"
    with anyio.move_on_after(parts.settings.ready_timeout_s):
        try:
            # Abandoned when the time is over: a wedged store must not wedge the probe.
            await anyio.to_thread.run_sync(_use_store, parts, abandon_on_cancel=True)
        except TransferError as error:
            return str(error)
        return None
    return f"store: does not answer within {parts.settings.ready_timeout_s:g} s"


def _use_store(parts: Components) -> None:
    with parts.store.transaction() as transaction:
        transaction.get("meta", "ticket_key")
