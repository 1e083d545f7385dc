"""What `pull --json` says of a transfer: totals, and the same of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weightwire.service.client.pulls import Pulled
from weightwire.transfer.errors import CancelledError, TransferError
from weightwire.transfer.filling import SourceBytes
from weightwire.transfer.session import RankProgress, TransferState

Json = dict[str, object]


def pulled_json(pulled: Pulled) -> Json:
    """Of a transfer whose ranks are all ready."""
    return {
        "transfer_id": pulled.transfer_id,
        "state": "ready",
        "seconds": pulled.seconds,
        **_origins(pulled.bytes_peer, pulled.bytes_disk, pulled.tensors, pulled.sources),
        # Of answers' bodies, whatever became of them: what damage and lost sources have cost.
        "bytes_received": pulled.bytes_received,
        "failures": [
            {"instance_id": failure.instance_id, "rank": failure.rank, "code": failure.code, "detail": failure.detail}
            for failure in pulled.failures
        ],
        "reasons": dict(pulled.reasons),
        "ranks": [
            {
                "rank": rank.rank,
                "state": "ready",
                # The whole of a single rank's is the transfer's.
                "seconds": rank.result.seconds if len(pulled.ranks) > 1 else pulled.seconds,
                **_origins(rank.result.bytes_peer, rank.result.bytes_disk, rank.result.tensors, rank.result.sources),
                "bytes_received": rank.result.bytes_received,
            }
            for rank in pulled.ranks
        ],
        "error": None,
    }


def failed_json(
    error: TransferError, progress: Mapping[int, RankProgress], *, transfer_id: str | None, seconds: float
) -> Json:
    """Of a transfer that failed, without its error.

    Args:
        error: Why.
        progress: How far each rank is that had begun.
        transfer_id: If there is one.
        seconds: Since the beginning.
    """
    state = "cancelled" if isinstance(error, CancelledError) else "failed"
    ranks: list[Json] = [
        {
            "rank": rank,
            # A rank may be ready where another one is not; the instance is not, then.
            "state": "ready" if reached.state is TransferState.READY else state,
            "seconds": seconds,
            **_unverified(reached.bytes_peer, reached.bytes_disk),
        }
        for rank, reached in sorted(progress.items())
    ]
    peer = sum(reached.bytes_peer for reached in progress.values())
    disk = sum(reached.bytes_disk for reached in progress.values())
    return {
        "transfer_id": transfer_id, "state": state, "seconds": seconds, **_unverified(peer, disk), "ranks": ranks
    }  # fmt: skip


def _origins(bytes_peer: int, bytes_disk: int, tensors: Mapping[str, int], sources: Iterable[SourceBytes]) -> Json:
    return {
        "verified": True,
        "transport": "http" if bytes_peer else None,
        "bytes_peer": bytes_peer,
        "bytes_disk": bytes_disk,
        "tensors": dict(tensors),
        "sources": [
            {"instance_id": source.instance_id, "rank": source.rank, "bytes": source.nbytes} for source in sources
        ],
    }


def _unverified(bytes_peer: int, bytes_disk: int) -> Json:
    return {
        "verified": False,
        "transport": None,
        "bytes_peer": bytes_peer,
        "bytes_disk": bytes_disk,
        "tensors": dict.fromkeys(("identical", "reshard", "disk", "constant"), 0),
        "sources": [],
    }
