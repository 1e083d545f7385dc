"""Dry runs for targets that are not there yet, against a real service whose sources are manifests alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from tests.faults.checkpoints import EXPERTS
from weightwire.service.client.api import RankBinding, ServiceClient
from weightwire.service.client.dry_runs import plan_side, preferred_source, published_identity
from weightwire.service.server import running_service
from weightwire.service.settings import Settings
from weightwire.transfer.errors import ManifestError, NotFoundError, TopologyError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import parse_config
from weightwire.transfer.models.expected_specs import expected_specs
from weightwire.transfer.topology_plan import Side, plan_topologies, trace_rank

MODEL = "org/tiny"
CONFIG = json.dumps(dict(EXPERTS))
IDENTITY = ModelIdentity(
    model=MODEL, revision="r1", config=CONFIG, checkpoint=expected_specs(parse_config(CONFIG))
)  # fmt: skip
TP1, TP2, EP2 = Topology(), Topology(tp=2), Topology(tp=2, ep=2)


@pytest.fixture
def client() -> Iterator[ServiceClient]:
    with running_service(Settings(port=0)) as url, ServiceClient(url) as client:
        yield client


def serve(
    client: ServiceClient,
    topology: Topology,
    *,
    instance_id: str = "s",
    identity: ModelIdentity = IDENTITY,
    weight_version: int = 0,
) -> None:
    ranks = [
        RankBinding(instance_id=instance_id, generation=1, rank=rank, url="http://127.0.0.1:7000")
        for rank in range(topology.world_size)
    ]
    client.register_ranks(ranks, model=identity.model, revision=identity.revision, topology=topology)
    for binding in ranks:
        manifest = trace_rank(identity, Side(topology=topology), binding.rank).manifest
        client.publish(binding, manifest, weight_version=weight_version)


def test_published_identity_is_what_the_source_was_made_of(client: ServiceClient) -> None:
    serve(client, TP2)
    assert published_identity(client, MODEL) == IDENTITY
    assert published_identity(client, MODEL, revision="r1") == IDENTITY


def test_published_identity_is_that_of_the_newest_weights(client: ServiceClient) -> None:
    for number, revision in enumerate(("r3", "r1", "r2")):
        identity = replace(IDENTITY, revision=revision)
        serve(client, TP1, instance_id=f"s{number}", identity=identity, weight_version=number % 2)
    assert published_identity(client, MODEL).revision == "r1"
    assert published_identity(client, MODEL, revision="r2").revision == "r2"


def test_of_equally_new_weights_those_that_most_hold_are_preferred(client: ServiceClient) -> None:
    for number, revision in enumerate(("r1", "r2", "r2")):
        serve(client, TP1, instance_id=f"s{number}", identity=replace(IDENTITY, revision=revision))
    assert published_identity(client, MODEL).revision == "r2"


def test_model_that_nobody_serves_has_no_identity(client: ServiceClient) -> None:
    ranks = [RankBinding(instance_id="s", generation=1, rank=0, url="http://127.0.0.1:7000")]
    client.register_ranks(ranks, model=MODEL, revision="r1", topology=TP2)
    assert preferred_source(client, MODEL) is None
    with pytest.raises(NotFoundError, match="no instance can serve it now; s: rank 0 has published nothing; start "):
        published_identity(client, MODEL)


def test_model_in_another_revision_is_named_with_it(client: ServiceClient) -> None:
    serve(client, TP1)
    with pytest.raises(NotFoundError, match=r"revision is '.*', asked for 'other'; start "):
        published_identity(client, MODEL, revision="other")


@pytest.mark.parametrize("target", [TP1, TP2, EP2, Topology(tp=2, pp=2)], ids=str)
def test_service_plans_what_the_offline_plan_says(client: ServiceClient, target: Topology) -> None:
    serve(client, EP2)
    side, ranks = Side(topology=target), range(target.world_size)
    seen: list[int] = []
    answer = plan_side(client, published_identity(client, MODEL), side, ranks, on_rank=seen.append)
    offline = plan_topologies(IDENTITY, Side(topology=EP2), side, ranks)
    assert seen == list(ranks)
    assert (answer["bytes"], answer["copies"]) == (offline.nbytes, offline.copies)
    assert answer["segments"] == answer["copies"]
    ways = cast("dict[str, int]", answer["ways"])
    assert ways == {way: offline.ways[way] for way in ("identical", "reshard", "disk", "constant")}
    assert answer["bytes_per_source_rank"] == {str(rank): sent for rank, sent in enumerate(offline.source_bytes)}
    assert answer["bytes_per_target_rank"] == {str(rank.rank): rank.nbytes for rank in offline.ranks}
    sources = cast("list[dict[str, object]]", answer["sources"])
    assert [(source["rank"], source["bytes"]) for source in sources] == list(enumerate(offline.source_bytes))
    tensors = cast("list[dict[str, object]]", answer["tensors"])
    assert [(tensor["rank"], tensor["name"], tensor["way"], tensor["bytes"]) for tensor in tensors] == [
        (rank.rank, way.name, way.way, way.nbytes) for rank in offline.ranks for way in rank.ways
    ]
    assert cast(float, answer["seconds_trace"]) > 0
    assert (answer["revision"], answer["error"], answer["opaque"]) == ("r1", None, [])


def test_topology_that_the_model_cannot_have_never_reaches_the_service(client: ServiceClient) -> None:
    serve(client, TP1)
    with pytest.raises(TopologyError, match="rank 0"):
        plan_side(client, IDENTITY, Side(topology=Topology(tp=3)), range(3))


def test_target_of_another_shape_is_refused(client: ServiceClient) -> None:
    serve(client, TP1)
    config = json.dumps({**EXPERTS, "vocab_size": 42})
    other = replace(IDENTITY, config=config, checkpoint=expected_specs(parse_config(config)))
    with pytest.raises(ManifestError, match=r"embed_tokens|lm_head"):
        plan_side(client, other, Side(topology=TP2), [0])


def test_plan_of_no_rank_is_a_mistake(client: ServiceClient) -> None:
    with pytest.raises(ValueError, match="at least one"):
        plan_side(client, IDENTITY, Side(topology=TP1), [])
