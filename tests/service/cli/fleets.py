"""Instances and transfers as the API tells them, in as few words as possible. They live around second 1000."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType

Json = dict[str, object]
ONE_RANK: Mapping[str, int] = MappingProxyType({"tp": 1, "pp": 1, "ep": 1})


def instance(
    name: str,
    *,
    reason: str | None = None,
    versions: tuple[int | None, ...] = (1,),
    leases: tuple[float, ...] = (1012.0,),
    topology: Mapping[str, int] = ONE_RANK,
) -> Json:
    """One instance; a rank for each lease."""
    return {
        "instance_id": name,
        "model": "org/llama-3-70b-instruct",
        "revision": "a1fa972104151112f1b66e6576d08fe9",
        "epoch": 1,
        "topology": dict(topology),
        "state": "ready" if reason is None else "incomplete",
        "reason": reason,
        "ranks": [
            {
                "rank": number,
                "expires_at": datetime.fromtimestamp(lease, UTC).isoformat(),
                "published": None if version is None else {"weight_version": version, "manifest_digest": "d"},
            }
            for number, (lease, version) in enumerate(zip(leases, versions, strict=True))
        ],
    }


def transfer(
    number: int,
    target: str,
    sources: Mapping[str, int],
    *,
    state: str = "receiving",
    done: int = 300_000_000,
    standby: Mapping[str, int] = MappingProxyType({}),
    error: str | None = None,
    **members: object,
) -> Json:
    """One transfer of a gigabyte that has been running for ten seconds, with bytes by source."""
    rank = {
        "rank": 0, "state": state, "bytes_total": 10**9, "bytes_peer": done, "bytes_disk": 0, "error": None,
    }  # fmt: skip
    return {
        "transfer_id": f"{number:024}",
        "state": state,
        "model": "org/llama-3-70b-instruct",
        "weight_version": 1,
        "target_instance_id": target,
        "seconds": 10.0,
        "bytes_total": 10**9,
        "bytes_peer": done,
        "bytes_disk": 0,
        "rate_bytes_per_s": done / 10,
        "ranks": [rank],
        "sources": [
            {
                "instance_id": name,
                "rank": 0,
                "bytes": nbytes,
                "standby": standby.get(name, 0),
                "relay": not name.startswith("source"),
            }
            for name, nbytes in sources.items()
        ],
        "reasons": [],
        "error": None if error is None else {"code": "coverage_incomplete", "detail": error},
        **members,
    }
