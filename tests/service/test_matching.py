"""The choice of sources: pure, deterministic, with a reason for each instance that is not taken."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.service.instances import Instance, Publication, RankProcess
from weightwire.service.matching import Choice, Want, choose_sources
from weightwire.transfer.manifest import Topology

NOW = 1000.0
TP2 = Topology(tp=2)
TOPOLOGIES = [Topology(), TP2, Topology(pp=2), Topology(tp=4, pp=2, ep=2)]


def source(
    instance_id: str,
    *,
    model: str = "m",
    revision: str = "r1",
    version: int = 0,
    digest: str = "d",
    nbytes: int = 100,
    topology: Topology | None = None,
    expires_at: float = NOW + 1,
    url: str | None = "http://h:1",
    without: int | None = None,
) -> Instance:
    topology = topology or Topology()
    publication = Publication(weight_version=version, digest=digest, nbytes=nbytes)
    ranks = {
        rank: RankProcess(
            rank=rank,
            generation=1,
            url=url,
            lease_s=1,
            renewed_at=NOW,
            expires_at=expires_at,
            publication=publication,
        )
        for rank in range(topology.world_size)
        if rank != without
    }
    return Instance(instance_id=instance_id, model=model, revision=revision, topology=topology, epoch=1, ranks=ranks)


def choose(
    *instances: Instance,
    revision: str | None = None,
    version: int | None = None,
    topology: Topology | None = None,
    limit: int = 8,
    readers: Mapping[str, int] | None = None,
) -> Choice:
    want = Want(
        model="m",
        revision=revision,
        weight_version=version,
        topology=topology or Topology(),
        exclude_instance="target",
        max_sources=limit,
    )
    shuffled = Random(0).sample(instances, len(instances))
    return choose_sources(shuffled, want, readers=readers or {}, now=NOW)


def taken(choice: Choice) -> list[str]:
    return [instance.instance_id for instance in choice.sources]


def reasons(choice: Choice) -> dict[str, str]:
    return {reason.instance_id: reason.reason for reason in choice.reasons}


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        pytest.param(source("x", expires_at=NOW), "the lease of rank 0 ran out 0.0 s ago", id="an expired one"),
        pytest.param(source("x", url=None), "rank 0 does not serve", id="one without a URL"),
        pytest.param(
            source("x", topology=Topology(tp=2), without=1), "rank 1 has not registered", id="one that lacks a rank"
        ),
        pytest.param(source("x", revision="r2"), "revision is 'r2', asked for 'r1'", id="another revision"),
        pytest.param(source("x", version=4), "weight version is 4, asked for 5", id="another version"),
    ],
)
def test_choose_sources_says_why_not(candidate: Instance, reason: str) -> None:
    choice = choose(source("ok", version=5), candidate, revision="r1", version=5)
    assert taken(choice) == ["ok"]
    assert reasons(choice) == {candidate.instance_id: reason}


@pytest.mark.parametrize(
    "candidate",
    [
        pytest.param(source("x", model="other"), id="an instance of another model"),
        pytest.param(source("target"), id="the target itself"),
    ],
)
def test_choose_sources_passes_over(candidate: Instance) -> None:
    choice = choose(candidate)
    assert (choice.sources, choice.reasons) == ((), ())


def test_choose_sources_without_any_keeps_what_was_asked_for() -> None:
    choice = choose(source("x"), revision="r9", version=2)
    assert (choice.revision, choice.weight_version, choice.sources) == ("r9", 2, ())
    assert reasons(choice) == {"x": "revision is 'r1', asked for 'r9'"}


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        pytest.param(
            [source("a", revision="old", version=3), source("b", revision="old", version=3), source("c", version=4)],
            ("r1", 4, ["c"]),
            id="the newest version, though fewer hold it",
        ),
        pytest.param(
            [source("a", revision="r1"), source("b", revision="r2"), source("c", revision="r2")],
            ("r2", 0, ["b", "c"]),
            id="at one version the revision that most hold",
        ),
        pytest.param(
            [source("a", revision="r2"), source("b", revision="r1")],
            ("r1", 0, ["b"]),
            id="among equals the revision that sorts first",
        ),
        pytest.param(
            [source("a", revision="r2", version=9, expires_at=NOW), source("b", revision="r1")],
            ("r1", 0, ["b"]),
            id="a newer version that nobody can serve does not count",
        ),
        pytest.param(
            [source("a", version=3), source("b", version=4, topology=TP2)],
            ("r1", 4, ["b"]),
            id="the newest version, though another topology holds it",
        ),
    ],
)
def test_choose_sources_settles_revision_and_version(
    instances: list[Instance], expected: tuple[str, int, list[str]]
) -> None:
    choice = choose(*instances)
    assert (choice.revision, choice.weight_version, taken(choice)) == expected
    assert set(reasons(choice)) == {instance.instance_id for instance in instances} - set(expected[2])


@pytest.mark.parametrize(
    ("instances", "readers", "expected"),
    [
        pytest.param(
            [source("a", nbytes=50), source("b", nbytes=100), source("c", nbytes=50)],
            {"b": 5},
            ["b", "a", "c"],
            id="most bytes first, however busy",
        ),
        pytest.param(
            [source("a", digest="x"), source("b", digest="y"), source("c", digest="y")],
            {"b": 1, "c": 1},
            ["b", "c", "a"],
            id="at equal bytes the manifests that most share",
        ),
        pytest.param([source("a"), source("b"), source("c")], {"a": 2, "b": 1}, ["c", "b", "a"], id="then the idle"),
        pytest.param([source("b"), source("a"), source("c")], {}, ["a", "b", "c"], id="then by id"),
        pytest.param(
            [source("a", topology=TP2, nbytes=500), source("b", nbytes=100), source("c", nbytes=50)],
            {"b": 9},
            ["b", "c", "a"],
            id="those of another topology last, however much they hold",
        ),
        pytest.param(
            [source("a", topology=TP2, nbytes=50), source("b", topology=Topology(pp=2), nbytes=100)],
            {},
            ["b", "a"],
            id="among other topologies most bytes first",
        ),
    ],
)
def test_choose_sources_orders_them(instances: list[Instance], readers: dict[str, int], expected: list[str]) -> None:
    assert taken(choose(*instances, readers=readers)) == expected


def test_choose_sources_takes_no_more_than_asked_and_says_so() -> None:
    choice = choose(*(source(name) for name in "abcd"), limit=2)
    assert taken(choice) == ["a", "b"]
    assert reasons(choice) == dict.fromkeys("cd", "2 other sources are preferred")


def test_choose_sources_takes_an_instance_of_several_ranks_whole() -> None:
    assert taken(choose(source("a", topology=TP2), topology=TP2)) == ["a"]


@pytest.mark.parametrize("target", TOPOLOGIES, ids=str)
def test_choose_sources_takes_any_topology_for_any_target(target: Topology) -> None:
    candidates = [source(str(number), topology=topology) for number, topology in enumerate(TOPOLOGIES)]
    choice = choose(*candidates, topology=target)
    assert (len(choice.sources), choice.reasons) == (len(TOPOLOGIES), ())
    assert choice.sources[0].topology == target


@st.composite
def fleets(draw: st.DrawFn) -> list[Instance]:
    """Instances of one model, some of which cannot serve."""
    found = []
    for instance_id in draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)):
        topology, nbytes = draw(st.sampled_from(TOPOLOGIES)), draw(st.sampled_from([50, 100]))
        # As in life, one manifest is of one size and topology.
        digest = f"{draw(st.sampled_from('xy'))} {topology} {nbytes}"
        version, without = draw(st.integers(0, 1)), draw(st.sampled_from([None, None, None, 0]))
        found.append(
            source(instance_id, topology=topology, nbytes=nbytes, digest=digest, version=version, without=without)
        )
    return found


Readers = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 2))


@given(fleets(), Readers, st.sampled_from(TOPOLOGIES), st.integers(1, 4), st.randoms(use_true_random=False))
def test_choice_does_not_depend_on_the_order_of_the_instances(
    instances: list[Instance], readers: dict[str, int], topology: Topology, limit: int, random: Random
) -> None:
    choice = choose(*instances, topology=topology, readers=readers, limit=limit)
    assert choose(*random.sample(instances, len(instances)), topology=topology, readers=readers, limit=limit) == choice


@given(fleets(), Readers, st.sampled_from(TOPOLOGIES), st.integers(1, 4))
def test_every_instance_is_taken_or_has_a_reason(
    instances: list[Instance], readers: dict[str, int], topology: Topology, limit: int
) -> None:
    choice = choose(*instances, topology=topology, readers=readers, limit=limit)
    assert sorted([*taken(choice), *reasons(choice)]) == sorted(instance.instance_id for instance in instances)
    assert {(source.revision, source.weight_version) for source in choice.sources} <= {
        (choice.revision, choice.weight_version)
    }
    # Fewer sources are the same ones, from the front.
    assert taken(choice) == taken(choose(*instances, topology=topology, readers=readers))[:limit]


@given(fleets(), Readers, st.sampled_from(TOPOLOGIES))
def test_order_puts_topology_before_bytes_before_load(
    instances: list[Instance], readers: dict[str, int], topology: Topology
) -> None:
    choice = choose(*instances, topology=topology, readers=readers)
    for first, second in pairwise(choice.sources):
        is_ours, is_ours_too = (instance.topology == topology for instance in (first, second))
        assert is_ours >= is_ours_too
        if is_ours != is_ours_too:
            continue
        assert first.nbytes >= second.nbytes
        if first.digests == second.digests:
            loads = [(readers.get(instance.instance_id, 0), instance.instance_id) for instance in (first, second)]
            assert loads == sorted(loads)
    held = [instance.digests for instance in choice.sources]
    assert len(list(groupby(held))) == len(set(held)), "the holders of one manifest stand together"
