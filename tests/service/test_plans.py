"""Dry runs: any topology against all ranks of all sources."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.service.conftest import MODEL, REVISION, Clock, Fleet
from weightwire.service.matching import Want
from weightwire.service.plans import DryRun, Planner
from weightwire.transfer.errors import ManifestMismatchError, NotFoundError, RequestError
from weightwire.transfer.manifest import CheckpointSpec, Manifest, TensorEntry, Topology, layout_fingerprint
from weightwire.transfer.placement import PlacedPiece
from weightwire.transfer.regions import row_major

TP1, TP2, TP4, TP8 = (Topology(tp=tp) for tp in (1, 2, 4, 8))
# Float32: the matrix is cut by rows, each rank has all of the norm.
ROWS, COLUMNS = 64, 512
MATRIX_BYTES, NORM_BYTES = 4 * ROWS * COLUMNS, 4 * COLUMNS


def entry(name: str, shape: tuple[int, ...], *, storage: int, begin: int, of: str, topology: Topology) -> TensorEntry:
    region = row_major(shape)
    layout = layout_fingerprint(
        engine="test", dtype="float32", shape=shape, strides=region.strides, facts={"sizes": str(topology)}
    )
    piece = PlacedPiece.of(of, checkpoint=region.shifted(begin), runtime=region)
    return TensorEntry(
        name=name,
        dtype="float32",
        shape=shape,
        strides=region.strides,
        storage=storage,
        offset=0,
        layout=layout,
        placement=(piece,),
    )


def split(
    topology: Topology,
    rank: int,
    *,
    revision: str = REVISION,
    without_norm: bool = False,
    others: tuple[TensorEntry, ...] = (),
) -> Manifest:
    """What a rank holds of a model of two tensors."""
    rows = ROWS // topology.world_size
    matrix = entry("w", (rows, COLUMNS), storage=0, begin=rank * rows * COLUMNS, of="matrix", topology=topology)
    norm = entry("norm", (COLUMNS,), storage=1, begin=0, of="norm", topology=topology)
    return Manifest(
        model=MODEL,
        revision=revision,
        topology=topology,
        rank=rank,
        storages=(matrix.nbytes, norm.nbytes, *(other.nbytes for other in others)),
        tensors=(matrix, *(() if without_norm else (norm,)), *others),
        checkpoint=(
            CheckpointSpec(name="matrix", dtype="float32", shape=(ROWS, COLUMNS)),
            CheckpointSpec(name="norm", dtype="float32", shape=(COLUMNS,)),
        ),
    )


def ranks(topology: Topology, *, revision: str = REVISION) -> list[Manifest]:
    return [split(topology, rank, revision=revision) for rank in range(topology.world_size)]


def serve(fleet: Fleet, instance_id: str, manifests: Sequence[Manifest], *, weight_version: int = 0) -> None:
    fleet.register(instance_id, topology=manifests[0].topology, revision=manifests[0].revision)
    for manifest in manifests:
        fleet.publish(instance_id, manifest.rank, manifest=manifest, weight_version=weight_version)


@pytest.fixture
def planner(fleet: Fleet, clock: Clock) -> Planner:
    return Planner(fleet.registry, fleet.transfers, fleet.manifests, clock=clock)


def plan(
    planner: Planner, topology: Topology, targets: Sequence[Manifest] | None, *, revision: str | None = None
) -> DryRun:
    want = Want(
        model=MODEL,
        revision=revision,
        weight_version=None,
        topology=topology,
        exclude_instance=None,
        max_sources=8,
    )
    return planner.dry_run(want, targets)


@pytest.mark.parametrize("target", [TP1, TP2, TP4, Topology(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("source", [TP1, TP2, TP8], ids=str)
def test_everything_comes_from_a_source_of_any_topology(
    fleet: Fleet, planner: Planner, source: Topology, target: Topology
) -> None:
    serve(fleet, "s", ranks(source))
    dry_run = plan(planner, target, ranks(target))
    assert dry_run.ways["disk"] == 0
    assert [rank.nbytes for rank in dry_run.ranks] == [split(target, 0).total_bytes] * target.world_size
    assert sum(dry_run.source_bytes.values()) == sum(rank.nbytes for rank in dry_run.ranks)
    assert {key[0] for key in dry_run.source_bytes} == {"s"}
    assert [source.key for instance in dry_run.sources for source in instance.ranks] == [
        ("s", rank) for rank in range(source.world_size)
    ]


def test_bytes_are_counted_by_the_rank_that_sends_them(fleet: Fleet, planner: Planner) -> None:
    serve(fleet, "s", ranks(TP4))
    first, second = plan(planner, TP2, ranks(TP2)).ranks
    for rank, senders in ((first, (0, 1)), (second, (2, 3))):
        [matrix, norm] = rank.plan.ways
        assert (matrix.way, matrix.nbytes) == ("reshard", MATRIX_BYTES // 2)
        assert sorted(rank.sources_of(matrix)) == [("s", sender) for sender in senders]
        assert norm.nbytes == NORM_BYTES
        assert sum(rank.source_bytes.values()) == MATRIX_BYTES // 2 + NORM_BYTES
        assert all(rank.source_bytes["s", sender] >= MATRIX_BYTES // 4 for sender in senders)


def test_holders_of_one_manifest_send_equal_parts(fleet: Fleet, planner: Planner) -> None:
    for name in ("a", "b", "c"):
        serve(fleet, name, ranks(TP2))
    dry_run = plan(planner, TP2, [split(TP2, 1)])
    sent = [dry_run.source_bytes[name, 1] for name in "abc"]
    assert sum(sent) + sum(dry_run.source_bytes[name, 0] for name in "abc") == split(TP2, 1).total_bytes
    assert max(sent) - min(sent) <= 1
    assert min(sent) >= MATRIX_BYTES // 2 // 3


def test_rank_of_the_targets_own_topology_is_taken_as_it_is(fleet: Fleet, planner: Planner) -> None:
    serve(fleet, "a", ranks(TP4))
    serve(fleet, "b", ranks(TP2))
    dry_run = plan(planner, TP2, ranks(TP2))
    assert [instance.ranks[0].instance_id for instance in dry_run.sources] == ["b", "a"]
    for rank in dry_run.ranks:
        [matrix, _] = rank.plan.ways
        assert (matrix.way, rank.sources_of(matrix)) == ("identical", [("b", rank.rank)])


def test_without_a_target_the_layout_of_a_source_of_the_topology_counts(fleet: Fleet, planner: Planner) -> None:
    serve(fleet, "s", ranks(TP2))
    dry_run = plan(planner, TP2, None)
    assert [rank.rank for rank in dry_run.ranks] == [0, 1]
    assert dry_run.ways == {"identical": 4}


def test_without_a_target_another_topology_cannot_be_planned(fleet: Fleet, planner: Planner) -> None:
    serve(fleet, "s", ranks(TP2))
    with pytest.raises(RequestError) as caught:
        plan(planner, TP4, None)
    assert "source 's' has tp=2 pp=1 ep=1, asked for tp=4 pp=1 ep=1; expected the manifest of" in str(caught.value)
    assert "weightwire plan --config" in str(caught.value)


def test_without_a_target_and_a_source_nothing_can_be_planned(fleet: Fleet, planner: Planner) -> None:
    fleet.register("s", topology=TP2, ranks=(0,))
    with pytest.raises(NotFoundError) as caught:
        plan(planner, TP2, None)
    assert caught.value.facts["reasons"] == [{"instance_id": "s", "reason": "rank 0 has published nothing"}]


def test_without_a_source_everything_is_left_to_the_disk(planner: Planner) -> None:
    dry_run = plan(planner, TP2, ranks(TP2))
    assert (dry_run.ways, dry_run.source_bytes, dry_run.sources) == ({"disk": 4}, {}, ())
    assert [rank.uncovered for rank in dry_run.ranks] == [{}, {}], "placements say what to read"


def test_what_nobody_knows_the_place_of_is_uncovered(fleet: Fleet, planner: Planner) -> None:
    serve(fleet, "s", ranks(TP2))
    scratch = TensorEntry(
        name="scratch", dtype="float32", shape=(6,), strides=(1,), storage=2, offset=0, layout="x", kind="attribute"
    )
    [rank] = plan(planner, TP1, [split(TP1, 0, others=(scratch,))]).ranks
    assert rank.uncovered == {"scratch": 6}
    assert {way.name: way.way for way in rank.plan.ways}["scratch"] == "disk"


def test_instance_that_lacks_a_rank_is_no_source_and_says_which(fleet: Fleet, planner: Planner) -> None:
    serve(fleet, "s", ranks(TP4))
    fleet.registry.leave("s", epoch=1, rank=2)
    dry_run = plan(planner, TP1, ranks(TP1))
    assert [(reason.instance_id, reason.reason) for reason in dry_run.reasons] == [("s", "rank 2 has not registered")]
    assert dry_run.ways == {"disk": 2}


def test_revision_of_the_targets_is_the_one_that_is_asked_for(fleet: Fleet, planner: Planner) -> None:
    serve(fleet, "new", ranks(TP2, revision="r2"), weight_version=9)
    serve(fleet, "ours", ranks(TP2, revision="r1"), weight_version=1)
    dry_run = plan(planner, TP1, ranks(TP1, revision="r1"))
    assert (dry_run.revision, dry_run.weight_version) == ("r1", 1)
    assert {name for name, _ in dry_run.source_bytes} == {"ours"}
    assert plan(planner, TP1, ranks(TP1, revision="")).revision == "r2"


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        pytest.param(
            [split(TP2, 0), split(TP2, 1, revision="r2")],
            "rank 1: revision is 'r2', asked for 'r1'",
            id="two revisions",
        ),
        pytest.param([split(TP2, 0), split(TP2, 0)], "two are of one rank", id="one rank twice"),
        pytest.param(
            [split(TP4, 3)], "rank 3: topology is tp=4 pp=1 ep=1, asked for tp=2 pp=1 ep=1", id="another topology"
        ),
    ],
)
def test_targets_that_contradict_each_other_are_refused(
    fleet: Fleet, planner: Planner, targets: list[Manifest], words: str
) -> None:
    serve(fleet, "s", ranks(TP2))
    with pytest.raises(RequestError) as caught:
        plan(planner, TP2, targets)
    assert words in str(caught.value)


def test_target_of_another_dtype_is_refused(fleet: Fleet, planner: Planner) -> None:
    serve(fleet, "s", [split(TP1, 0)])
    half = Manifest(
        model=MODEL,
        revision=REVISION,
        storages=(2 * COLUMNS,),
        tensors=(
            TensorEntry(
                name="norm", dtype="float16", shape=(COLUMNS,), strides=(1,), storage=0, offset=0, layout="half"
            ),
        ),
    )
    with pytest.raises(ManifestMismatchError, match="dtype is float32 on the source, float16 on the target"):
        plan(planner, TP1, [half])
