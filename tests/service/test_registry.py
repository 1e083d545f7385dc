"""Instances and manifests: leases, epochs, generations, and what may be published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.service.conftest import Clock, Fleet, MakeApi, make_manifest
from weightwire.service.instances import InstanceState
from weightwire.service.manifests import Manifests
from weightwire.service.registry import Announcement, RankClaim, Registration, Registry
from weightwire.service.store import MemoryStore
from weightwire.transfer.errors import ConflictError, ManifestError, NotFoundError, RequestError, TransferError
from weightwire.transfer.manifest import Topology

TP2 = Topology(tp=2)
ANNOUNCED = Announcement(epoch=1, generation=1, weight_version=0, digest="0" * 64, manifest=None)


def state(fleet: Fleet, instance_id: str = "s") -> InstanceState:
    return fleet.registry.instance(instance_id).state(fleet.clock())


def test_instance_is_ready_when_all_ranks_have_published(fleet: Fleet) -> None:
    fleet.register("s", topology=TP2, ranks=(0,))
    fleet.publish("s", 0)
    assert state(fleet) is InstanceState.INCOMPLETE
    fleet.register("s", topology=TP2, ranks=(1,), generation=7)
    assert fleet.registry.instance("s").why_no_source(fleet.clock()) == "rank 1 has published nothing"
    fleet.publish("s", 1, generation=7)
    assert state(fleet) is InstanceState.READY


def test_instance_is_not_ready_while_its_ranks_differ_in_version(fleet: Fleet) -> None:
    fleet.source("s", topology=TP2)
    fleet.publish("s", 1, weight_version=1)
    reason = fleet.registry.instance("s").why_no_source(fleet.clock())
    assert reason == "weight version is 1 on rank 1, 0 on rank 0"
    fleet.publish("s", 0, weight_version=1)
    assert state(fleet) is InstanceState.READY
    assert fleet.registry.instance("s").weight_version == 1


def test_instance_that_takes_only_is_no_source(fleet: Fleet) -> None:
    fleet.register("t", url=None)
    fleet.publish("t")
    assert fleet.registry.instance("t").why_no_source(fleet.clock()) == "rank 0 does not serve"
    fleet.register("t", url="http://10.0.0.2:7000")
    assert state(fleet, "t") is InstanceState.READY


def test_lease_runs_out_at_its_end_and_comes_back_with_the_next_renewal(fleet: Fleet, clock: Clock) -> None:
    fleet.source("s")
    clock.pass_(14.9)
    assert state(fleet) is InstanceState.READY
    clock.pass_(0.1)
    assert state(fleet) is InstanceState.EXPIRED
    fleet.register("s")
    assert state(fleet) is InstanceState.READY, "the same process has still published the same"


def test_lease_of_one_rank_takes_the_instance_out(fleet: Fleet, clock: Clock) -> None:
    fleet.source("s", topology=TP2)
    clock.pass_(10)
    fleet.register("s", topology=TP2, ranks=(0,))
    clock.pass_(10)
    assert state(fleet) is InstanceState.INCOMPLETE
    assert fleet.registry.instance("s").why_no_source(clock()) == "the lease of rank 1 ran out 5.0 s ago"


def test_lease_may_be_asked_for(fleet: Fleet, clock: Clock) -> None:
    assert fleet.register("s", lease_s=2.5).ranks[0].expires_at == clock() + 2.5


def test_higher_generation_replaces_the_process_and_its_publication(fleet: Fleet) -> None:
    fleet.source("s")
    fleet.register("s", generation=2)
    process = fleet.registry.instance("s").ranks[0]
    assert (process.generation, process.publication) == (2, None)


def test_lower_generation_is_refused_and_changes_nothing(fleet: Fleet, clock: Clock) -> None:
    fleet.register("s", generation=5)
    fleet.publish("s", generation=5)
    before = fleet.registry.instance("s")
    clock.pass_(1)
    with pytest.raises(ConflictError, match="rank 0: generation 4 is stale, the current one is 5") as caught:
        fleet.register("s", generation=4)
    assert caught.value.facts["current_generation"] == 5
    assert fleet.registry.instance("s") == before


def test_lower_generation_is_refused_after_the_lease_ran_out_too(fleet: Fleet, clock: Clock) -> None:
    fleet.register("s", generation=5)
    clock.pass_(100)
    with pytest.raises(ConflictError, match="stale"):
        fleet.register("s", generation=4)


def test_registration_with_one_stale_rank_renews_none(fleet: Fleet, clock: Clock) -> None:
    fleet.register("s", topology=TP2, ranks=(0,), generation=1)
    fleet.register("s", topology=TP2, ranks=(1,), generation=2)
    before = fleet.registry.instance("s")
    clock.pass_(1)
    with pytest.raises(ConflictError, match="rank 1"):
        fleet.register("s", topology=TP2, generation=1)
    assert fleet.registry.instance("s") == before


def test_higher_epoch_replaces_the_instance_wholly(fleet: Fleet) -> None:
    fleet.source("s", topology=TP2)
    instance = fleet.register("s", epoch=2, ranks=(0,), topology=Topology(), generation=1, model="other")
    assert (instance.epoch, instance.model, sorted(instance.ranks)) == (2, "other", [0])
    assert instance.ranks[0].publication is None


def test_lower_epoch_is_refused(fleet: Fleet) -> None:
    fleet.register("s", epoch=3)
    with pytest.raises(ConflictError, match="epoch 2 is stale, the current one is 3"):
        fleet.register("s", epoch=2, generation=99)


@pytest.mark.parametrize(
    ("again", "words"),
    [
        pytest.param(lambda fleet: fleet.register("s", model="other"), "model is 'org/name'", id="another model"),
        pytest.param(lambda fleet: fleet.register("s", revision="r2"), "revision is 'r1'", id="another revision"),
        pytest.param(lambda fleet: fleet.register("s", topology=TP2), "again as tp=2 pp=1 ep=1", id="another topology"),
    ],
)
def test_epoch_keeps_what_the_instance_is(fleet: Fleet, again: Callable[[Fleet], object], words: str) -> None:
    fleet.register("s")
    with pytest.raises(ConflictError, match="expected another --instance-id, or a higher --epoch") as caught:
        again(fleet)
    assert words in str(caught.value)


def test_revision_that_was_not_known_may_be_set_once(fleet: Fleet) -> None:
    fleet.register("t", revision=None, url=None)
    assert fleet.register("t", revision="r2").revision == "r2"
    assert fleet.register("t", revision=None).revision == "r2"
    with pytest.raises(ConflictError, match="revision is 'r2'"):
        fleet.register("t", revision="r3")


def test_revision_that_was_not_known_comes_with_the_manifest(fleet: Fleet) -> None:
    fleet.register("t", revision=None)
    fleet.publish("t", manifest=make_manifest(revision="r7"))
    assert fleet.registry.instance("t").revision == "r7"
    assert state(fleet, "t") is InstanceState.READY


@pytest.mark.parametrize("ranks", [pytest.param((0, 0), id="twice"), pytest.param((2,), id="outside the world")])
def test_register_refuses_ranks_that_cannot_be(fleet: Fleet, ranks: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="ranks"):
        fleet.register("s", topology=TP2, ranks=ranks)


def test_b32_register_refuses_a_name_that_resolves_to_loopback_for_a_peer_elsewhere(clock: Clock) -> None:
    asked: list[str] = []

    def resolve(host: str) -> list[str]:
        asked.append(host)
        return ["127.0.1.1"] if host == "bad" else ["fd00::7"]

    store = MemoryStore()
    registry = Registry(store, Manifests(store), clock=clock, resolve=resolve)

    def register(url: str) -> None:
        registry.register(
            Registration(
                instance_id="s",
                model="m",
                revision="r",
                epoch=1,
                topology=Topology(),
                ranks=(RankClaim(rank=0, generation=1, url=url),),
                peer_host="10.0.0.9",
            )
        )

    with pytest.raises(RequestError, match="leads to loopback"):
        register("http://bad:7000")
    register("http://good:7000")
    register("http://good:7000")
    assert asked == ["bad", "good"], "a renewal looks up nothing"


def test_leave_takes_an_instance_out_at_once(fleet: Fleet) -> None:
    fleet.source("s")
    with pytest.raises(ConflictError, match="epoch 2, but the current one is 1"):
        fleet.registry.leave("s", epoch=2)
    fleet.registry.leave("s", epoch=1)
    with pytest.raises(NotFoundError, match="instance 's': not registered"):
        fleet.registry.leave("s", epoch=1)


def test_leave_takes_one_rank_out_and_the_last_one_with_the_instance(fleet: Fleet) -> None:
    fleet.source("s", topology=TP2)
    fleet.registry.leave("s", epoch=1, rank=1)
    assert sorted(fleet.registry.instance("s").ranks) == [0]
    with pytest.raises(NotFoundError, match="rank 1: not registered"):
        fleet.registry.leave("s", epoch=1, rank=1)
    fleet.registry.leave("s", epoch=1, rank=0, generation=1)
    assert fleet.registry.instances() == []


def test_leave_of_an_old_process_does_not_take_its_successor_out(fleet: Fleet) -> None:
    fleet.register("s", generation=2)
    with pytest.raises(ConflictError, match="generation 1, but the current one is 2"):
        fleet.registry.leave("s", epoch=1, rank=0, generation=1)
    assert fleet.registry.instance("s").ranks[0].generation == 2


def test_publish_stores_a_manifest_once(fleet: Fleet) -> None:
    fleet.register("s1")
    fleet.register("s2")
    assert fleet.publish("s1") is True
    assert fleet.publish("s2") is False
    manifest = make_manifest()
    assert fleet.manifests.read(manifest.digest) == manifest


def test_publish_by_digest_alone_needs_a_known_manifest(fleet: Fleet) -> None:
    manifest = make_manifest()
    fleet.register("s1")
    fleet.register("s2")

    def publish(instance_id: str) -> bool:
        return fleet.registry.publish(instance_id, 0, replace(ANNOUNCED, digest=manifest.digest))

    with pytest.raises(NotFoundError, match="not known, send it") as caught:
        publish("s2")
    assert caught.value.facts == {"kind": "manifest", "name": manifest.digest}
    fleet.publish("s1", manifest=manifest)
    assert publish("s2") is False
    assert state(fleet, "s2") is InstanceState.READY


@pytest.mark.parametrize(
    ("publish", "error", "words"),
    [
        pytest.param(
            lambda fleet: fleet.publish("s", manifest=make_manifest(model="x")),
            ManifestError,
            "model is 'x'",
            id="model",
        ),
        pytest.param(
            lambda fleet: fleet.publish("s", manifest=make_manifest(revision="x")),
            ManifestError,
            "revision is 'x'",
            id="revision",
        ),
        pytest.param(
            lambda fleet: fleet.publish("s", manifest=make_manifest(topology=TP2)),
            ManifestError,
            "topology is",
            id="topology",
        ),
        pytest.param(
            lambda fleet: fleet.registry.publish("s", 0, replace(ANNOUNCED, manifest=make_manifest())),
            ManifestError,
            "announced as 000",
            id="digest",
        ),
        pytest.param(lambda fleet: fleet.publish("s", generation=2), ConflictError, "generation 2", id="generation"),
        pytest.param(lambda fleet: fleet.publish("s", epoch=2), ConflictError, "epoch 2", id="epoch"),
        pytest.param(
            lambda fleet: fleet.registry.publish("s", 1, ANNOUNCED),
            NotFoundError,
            "rank 1: not registered",
            id="rank",
        ),
    ],
)
def test_publish_refuses_what_does_not_agree_with_the_instance_and_stores_nothing(
    fleet: Fleet, publish: Callable[[Fleet], object], error: type[TransferError], words: str
) -> None:
    fleet.register("s")
    before = fleet.registry.instance("s")
    with pytest.raises(error) as caught:
        publish(fleet)
    assert words in str(caught.value)
    assert fleet.registry.instance("s") == before
    with pytest.raises(NotFoundError):
        fleet.manifests.packed_text(make_manifest().digest)


def test_publish_refuses_a_manifest_of_another_rank(fleet: Fleet) -> None:
    fleet.register("s", topology=TP2)
    with pytest.raises(ManifestError, match="rank is 1, expected 0"):
        fleet.publish("s", 0, manifest=make_manifest(topology=TP2, rank=1))


def test_publish_refuses_to_go_back_in_version(fleet: Fleet) -> None:
    fleet.source("s", weight_version=3)
    with pytest.raises(ConflictError, match="weight version 2 is older than 3"):
        fleet.publish("s", weight_version=2)


def test_publish_after_the_lease_ran_out_is_refused(fleet: Fleet, clock: Clock) -> None:
    fleet.register("s")
    clock.pass_(15)
    with pytest.raises(NotFoundError, match="its lease ran out; register again"):
        fleet.publish("s")


def test_source_keys_are_bound_to_the_process_and_survive_in_the_store(clock: Clock) -> None:
    store = MemoryStore()
    first, second, other = Fleet(store, clock), Fleet(store, clock), Fleet(MemoryStore(), clock)
    process = first.register("s").ranks[0]
    key = first.registry.source_key("s", process)
    assert second.registry.source_key("s", process) == key
    assert other.registry.source_key("s", process) != key
    assert first.registry.source_key("s", first.register("s", generation=2).ranks[0]) != key
    assert first.registry.source_key("s2", process) != key


def test_resume_prolongs_leases_that_were_live_when_the_service_went_away(clock: Clock) -> None:
    store = MemoryStore()
    before = Fleet(store, clock)
    before.source("dead")
    clock.pass_(20)
    before.source("alive")
    clock.pass_(1000)
    after = Fleet(store, clock)
    assert state(after, "alive") is InstanceState.EXPIRED, "without grace everybody would be gone"
    after.registry.resume(grace_s=15)
    assert state(after, "alive") is InstanceState.READY
    assert state(after, "dead") is InstanceState.EXPIRED, "its lease had run out while the service watched"
    clock.pass_(15)
    assert state(after, "alive") is InstanceState.EXPIRED


def test_resume_never_shortens_a_lease(clock: Clock) -> None:
    store = MemoryStore()
    expires_at = Fleet(store, clock).register("s", lease_s=600).ranks[0].expires_at
    after = Fleet(store, clock)
    after.registry.resume(grace_s=1)
    assert after.registry.instance("s").ranks[0].expires_at == expires_at


def test_forget_expired_drops_instances_after_their_time(fleet: Fleet, clock: Clock) -> None:
    fleet.register("old")
    clock.pass_(60)
    fleet.register("new")
    fleet.registry.forget_expired(keep_s=100)
    assert [instance.instance_id for instance in fleet.registry.instances()] == ["new", "old"]
    clock.pass_(55)
    fleet.registry.forget_expired(keep_s=100)
    assert [instance.instance_id for instance in fleet.registry.instances()] == ["new"]


def test_forget_manifests_drops_those_that_nobody_refers_to(fleet: Fleet, clock: Clock) -> None:
    used, granted, unused = (make_manifest(names=(name,)) for name in "xyz")
    for instance_id, manifest in (("a", used), ("b", granted), ("c", unused)):
        fleet.register(instance_id)
        fleet.publish(instance_id, manifest=manifest)
    for instance_id in ("b", "c"):
        fleet.registry.leave(instance_id, epoch=1)

    def sweep() -> None:
        fleet.manifests.forget_unused(keep_s=100, used=fleet.registry.used_manifests() | {granted.digest})

    sweep()
    clock.pass_(99)
    sweep()
    assert fleet.manifests.packed_text(unused.digest), "the time has not passed"
    clock.pass_(1)
    sweep()
    with pytest.raises(NotFoundError):
        fleet.manifests.packed_text(unused.digest)
    assert fleet.manifests.packed_text(used.digest)
    assert fleet.manifests.packed_text(granted.digest)


def test_forget_manifests_begins_anew_when_one_is_referred_to_again(fleet: Fleet, clock: Clock) -> None:
    manifest = make_manifest()
    fleet.source("a")
    fleet.registry.leave("a", epoch=1)
    fleet.manifests.forget_unused(keep_s=100, used=())
    clock.pass_(90)
    fleet.source("a")
    fleet.registry.leave("a", epoch=1)
    clock.pass_(50)
    fleet.manifests.forget_unused(keep_s=100, used=())
    assert fleet.manifests.packed_text(manifest.digest)


def test_service_that_starts_again_gives_its_instances_time_to_renew(make_api: MakeApi, clock: Clock) -> None:
    store = MemoryStore()
    make_api(store=store).register("s1").raise_for_status()
    clock.pass_(1000)
    again = make_api(store=store, lease_grace_s=40)
    assert again("GET", "/v1/instances/s1").json()["ranks"][0]["live"] is True
    clock.pass_(40)
    assert again("GET", "/v1/instances/s1").json()["ranks"][0]["live"] is False
