"""Transfers: granted, watched, reported on and cancelled."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from sse_starlette import EventSourceResponse

from weightwire.service.components import Components, Parts
from weightwire.service.events import progress_events
from weightwire.service.grants import Transfer
from weightwire.service.paths import RankNumber, TransferId
from weightwire.service.schemas import (
    PROBLEMS,
    GrantAnswer,
    Name,
    ProgressAnswer,
    ProgressBody,
    RankGrant,
    ReasonAnswer,
    SourceGrant,
    TransferAnswer,
    TransferBody,
    TransfersQuery,
    error_answer,
    instant,
)
from weightwire.transfer.wire.framing import understands_waits

# A listener that takes nothing for so long is gone, whatever its socket says.
_SEND_TIMEOUT_S = 60.0
_SEQUENCE = re.compile(r"\d{1,18}", re.ASCII)

router = APIRouter(prefix="/v1", tags=["transfers"], responses=PROBLEMS)


@router.post(
    "/transfers",
    status_code=201,
    summary="Grant a transfer: sources and tickets for each target rank",
    responses={200: {"model": GrantAnswer, "description": "The grant of an earlier request with the same key"}},
)
def create_transfer(
    body: TransferBody,
    response: Response,
    parts: Parts,
    *,
    idempotency_key: Annotated[Name | None, Header()] = None,
    weightwire_protocol: Annotated[str | None, Header()] = None,
) -> GrantAnswer:
    # Who speaks an older version would take a relay for a source that has everything.
    request = body.to_request(takes_relays=understands_waits(weightwire_protocol))
    transfer, is_new = parts.transfers.create(request, idempotency_key=idempotency_key)
    response.status_code = 201 if is_new else 200
    response.headers["Location"] = f"/v1/transfers/{transfer.transfer_id}"
    return _grant(transfer, parts)


@router.get("/transfers", summary="The newest transfers, newest first")
def list_transfers(query: Annotated[TransfersQuery, Query()], parts: Parts) -> list[TransferAnswer]:
    return [TransferAnswer.of(transfer, now=parts.clock()) for transfer in parts.transfers.newest(limit=query.limit)]


@router.get("/transfers/{transfer_id}", summary="One transfer: state, bytes, rate and time left, per rank")
def get_transfer(transfer_id: TransferId, parts: Parts) -> TransferAnswer:
    return TransferAnswer.of(parts.transfers.get(transfer_id), now=parts.clock())


@router.delete("/transfers/{transfer_id}", summary="Cancel a transfer; one that has ended stays as it is")
def cancel_transfer(transfer_id: TransferId, parts: Parts) -> TransferAnswer:
    return TransferAnswer.of(parts.transfers.cancel(transfer_id), now=parts.clock())


@router.post("/transfers/{transfer_id}/ranks/{rank}/progress", summary="Report how far a target rank is")
def report_progress(transfer_id: TransferId, rank: RankNumber, body: ProgressBody, parts: Parts) -> ProgressAnswer:
    transfer = parts.transfers.report(
        transfer_id,
        rank,
        body.to_progress(),
        generation=body.generation,
        sources=body.to_source_bytes(),
        failures=body.to_failures(),
    )
    return ProgressAnswer(
        state=transfer.state, error=error_answer(transfer.session.error_code, transfer.session.error_detail)
    )


@router.get(
    "/transfers/{transfer_id}/events",
    summary="Progress as server-sent events, until the transfer has ended",
    response_class=Response,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "Events `progress`, each a whole transfer"},
        204: {"description": "The transfer has ended, and the client has seen its last event"},
    },
)
def stream_events(
    transfer_id: TransferId, parts: Parts, last_event_id: Annotated[str | None, Header()] = None
) -> Response:
    # Read here already: an unknown transfer is a 404, and no empty stream.
    transfer = parts.transfers.get(transfer_id)
    seen = int(last_event_id) if last_event_id and _SEQUENCE.fullmatch(last_event_id) else 0
    if transfer.state.is_final and transfer.sequence <= seen:
        # By the standard of server-sent events this is what tells a browser not to connect again.
        return Response(status_code=204)
    return EventSourceResponse(
        progress_events(
            parts.changes,
            transfer_id,
            read=lambda: parts.transfers.get(transfer_id),
            render=lambda changed: TransferAnswer.of(changed, now=parts.clock()).model_dump_json(),
            last_sequence=seen,
        ),
        send_timeout=_SEND_TIMEOUT_S,
    )


def _grant(transfer: Transfer, parts: Components) -> GrantAnswer:
    return GrantAnswer(
        transfer_id=transfer.transfer_id,
        state=transfer.state,
        model=transfer.model,
        revision=transfer.revision,
        weight_version=transfer.weight_version,
        created_at=instant(transfer.created_at),
        deadline_at=instant(transfer.deadline_at),
        ranks=[
            RankGrant(
                rank=target.rank,
                sources=[
                    SourceGrant(
                        instance_id=source.instance_id,
                        epoch=source.epoch,
                        rank=source.rank,
                        generation=source.generation,
                        url=source.url,
                        weight_version=source.weight_version,
                        manifest_digest=source.manifest_digest,
                        certificate_sha256=source.certificate_sha256,
                        ticket=parts.registry.sign(transfer.ticket(target.rank, source)),
                        relay=instance.relay,
                        standby=instance.standby,
                    )
                    for instance in transfer.instances
                    for source in instance.in_order_for(target.rank, transfer.topology)
                ],
            )
            for target in transfer.ranks
        ],
        reasons=[ReasonAnswer.of(reason) for reason in transfer.reasons],
    )
