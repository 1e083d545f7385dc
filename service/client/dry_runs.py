"""Dry runs for targets that do not exist yet: laid out here without memory, planned by the service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import cast

from weightwire.service.client.api import Json, ServiceClient
from weightwire.transfer.errors import NotFoundError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.topology_plan import Side, trace_rank

# Members of an answer that are counts of something, or lists of it, over all ranks that were asked for.
_SUMS = ("seconds_plan", "copies", "segments", "bytes")
_LISTS = ("uncovered", "opaque", "tensors")


def published_identity(client: ServiceClient, model: str, *, revision: str | None = None) -> ModelIdentity:
    """What the sources of a model say it is: config, checkpoint specs and revision.

    Args:
        client: Of the service.
        model: Model id.
        revision: None takes what the service would take: the newest weights, then what most sources hold.

    Raises:
        NotFoundError: If nobody can serve it.
        ManifestError: If the service gives another manifest than was asked for.
    """
    source = preferred_source(client, model, revision=revision)
    if source is None:
        reasons = "; ".join(
            f"{other['instance_id']}: {other['reason'] or _other_revision(other, revision)}"
            for other in client.sources(model)
        )
        raise NotFoundError(
            f"model {model!r}: no instance can serve it now; {reasons or 'no instance has it'}; start `weightwire "
            "source`, or plan with --checkpoint and a folder that has a config.json",
            kind="source",
            name=model,
        )
    ranks = cast("list[Json]", source["ranks"])
    manifest = client.manifest(str(ranks[0]["manifest_digest"]))
    return ModelIdentity(
        model=model, revision=manifest.revision, config=manifest.config, checkpoint=manifest.checkpoint
    )


def _other_revision(source: Json, asked: str | None) -> str:
    return f"revision is {source['revision']!r}, asked for {asked!r}"


def preferred_source(client: ServiceClient, model: str, *, revision: str | None = None) -> Json | None:
    """The entry of a source whose version and revision a transfer would take; None if nobody can serve."""
    sources = [source for source in client.sources(model, revision=revision) if source["reason"] is None]
    holders = Counter((source["weight_version"], source["revision"]) for source in sources)

    def order(source: Json) -> tuple[int, int, str]:
        version, held = source["weight_version"], source["revision"]
        return -cast(int, version or 0), -holders[version, held], str(held)

    return min(sources, key=order, default=None)


def plan_side(
    client: ServiceClient,
    identity: ModelIdentity,
    target: Side,
    ranks: Iterable[int],
    *,
    on_rank: Callable[[int], None] = lambda _: None,
) -> Json:
    """Ask the service what each of some target ranks would take from where; one after the other, so that one is held.

    Args:
        client: Of the service.
        identity: With config and checkpoint specs; see `published_identity` and `describe_model`.
        target: How the target is laid out.
        ranks: Which of its ranks, at least one.
        on_rank: Called before each.

    Returns:
        The answers of the service as one, with what was found out here: `seconds_trace`, `opaque`, `uncovered`.

    Raises:
        TransferError: As `trace_rank` and `ServiceClient.plan` do.
    """
    total: Json | None = None
    for rank in ranks:
        on_rank(rank)
        traced = trace_rank(identity, target, rank)
        answer = client.plan(
            identity.model,
            revision=identity.revision or None,
            topology=target.topology,
            manifests=[traced.manifest],
        )
        answer["seconds_trace"] = traced.seconds
        answer["opaque"] = [
            {"side": "target", "rank": rank, "tensor": name, "reason": reason}
            for name, reason in traced.opaque.items()
        ]  # fmt: skip
        known = {str(item["tensor"]) for item in cast("list[Json]", answer["uncovered"])}
        cast("list[Json]", answer["uncovered"]).extend(
            {"rank": rank, "tensor": name, "elements": elements}
            for name, elements in traced.uncovered.items()
            if name not in known
        )
        total = answer if total is None else _added(total, answer)
    if total is None:
        raise ValueError("a dry run of no rank, expected at least one")
    return total


def _added(total: Json, answer: Json) -> Json:
    """Both answers as one; what is the same in both, such as the revision, is that of the first."""
    found = dict(total)
    for name in ("seconds_trace", *_SUMS):
        found[name] = cast(float, total[name]) + cast(float, answer[name])
    for name in _LISTS:
        found[name] = [*cast("list[Json]", total[name]), *cast("list[Json]", answer[name])]
    for name in ("ways", "bytes_per_source_rank", "bytes_per_target_rank"):
        counts = Counter(cast("dict[str, int]", total[name]))
        counts.update(cast("dict[str, int]", answer[name]))
        found[name] = dict(counts)
    found["sources"] = _added_sources(cast("list[Json]", total["sources"]), cast("list[Json]", answer["sources"]))
    return found


def _added_sources(total: list[Json], more: list[Json]) -> list[Json]:
    found: dict[tuple[object, object], Json] = {}
    for source in (*total, *more):
        key = (source["instance_id"], source["rank"])
        if key in found:
            found[key]["bytes"] = cast(int, found[key]["bytes"]) + cast(int, source["bytes"])
        else:
            found[key] = dict(source)
    return list(found.values())
