"""Sources that die, come back as somebody else, or were targets themselves."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import httpx

from tests.faults.checkpoints import MIB, check_saved
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab
from tests.faults.proxy import Proxy
from weightwire.service.client import PullRequest, ServiceClient, pull
from weightwire.transfer import Checkpoint


def failures(answer: Json) -> dict[str, str]:
    """Code by instance, of the sources that a pull gave up."""
    items = cast("list[dict[str, str]]", answer["failures"])
    return {item["instance_id"]: item["code"] for item in items}


def check_ready(answer: Json, model: Model) -> tuple[int, int]:
    """Check that a pull filled everything, each byte once; returns the bytes from peers and from disk."""
    assert (answer["state"], answer["verified"], answer["error"]) == ("ready", True, None)
    peer, disk = cast(int, answer["bytes_peer"]), cast(int, answer["bytes_disk"])
    assert peer + disk == model.nbytes
    return peer, disk


def digests_of(source: Json) -> list[object]:
    return [rank["manifest_digest"] for rank in cast("list[Json]", source["ranks"])]


def test_pull_b37_finishes_from_disk_when_its_source_is_killed_in_the_middle(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path
) -> None:
    source = served.ready_source(model.folder, *proxy.flags, "--instance-id", "doomed")
    proxy.hold_after(20 * MIB)
    target = served.pull("--checkpoint", model.folder, "--save", tmp_path / "out")
    proxy.wait_until_held()
    source.kill()
    proxy.release()
    answer = target.finish().check(0)
    peer, disk = check_ready(answer, model)
    assert 0 < peer <= proxy.passed_bytes
    assert answer["sources"] == [{"instance_id": "doomed", "rank": 0, "bytes": peer}]
    assert failures(answer) == {"doomed": "source_unreachable"}
    check_saved(tmp_path / "out", model.tensors)
    recorded = served.status(answer["transfer_id"])
    assert (recorded["state"], recorded["bytes_peer"], recorded["bytes_disk"]) == ("ready", peer, disk)


def test_pull_reads_from_disk_only_what_the_killed_source_had_not_delivered(
    served: Lab, proxy: Proxy, model: Model
) -> None:
    """The library's own view of the same: what the disk was asked for is what was missing, to the byte."""
    source = served.ready_source(model.folder, *proxy.flags)
    proxy.hold_after(20 * MIB)
    with (
        Checkpoint.open(model.folder) as checkpoint,
        ServiceClient(served.service) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        pulling = pool.submit(pull, client, PullRequest(model=served.model, checkpoint=checkpoint))
        proxy.wait_until_held()
        source.kill()
        proxy.release()
        pulled = pulling.result()
        assert checkpoint.bytes_read == pulled.result.bytes_disk > 0
    assert pulled.result.bytes_peer + pulled.result.bytes_disk == model.nbytes
    assert sum(source.nbytes for source in pulled.result.sources) == pulled.result.bytes_peer
    manifest = pulled.shells.manifest
    for name, expected in model.tensors.items():
        views = pulled.shells.gather(manifest.flat_region(manifest.by_name[name]))
        assert b"".join(views) == expected.data, name


def test_pull_reads_all_from_disk_when_its_source_died_before_the_start(
    served: Lab, model: Model, tmp_path: Path
) -> None:
    served.ready_source(model.folder, "--instance-id", "dead").kill()
    answer = served.pull("--checkpoint", model.folder, "--save", tmp_path / "out").finish().check(0)
    assert check_ready(answer, model) == (0, model.nbytes)
    # The service could not know yet, and granted it.
    assert failures(answer) == {"dead": "source_unreachable"}
    check_saved(tmp_path / "out", model.tensors)


def test_pull_without_disk_names_every_tensor_when_its_source_died_before_the_start(
    served: Lab, small: Model, tmp_path: Path
) -> None:
    served.ready_source(small.folder).kill()
    flags = ("--save", tmp_path / "out", "--serve", "--instance-id", "hopeless")
    outcome = served.pull(*flags).finish()
    answer = outcome.check(1)
    assert (answer["state"], answer["verified"], answer["bytes_peer"]) == ("failed", False, 0)
    assert outcome.error["code"] == "coverage_incomplete"
    assert set(cast("list[str]", outcome.error["missing"])) == set(small.tensors)
    assert not (tmp_path / "out").exists()
    with ServiceClient(served.service) as client:
        assert "hopeless" not in {instance["instance_id"] for instance in client.instances()}
    assert served.status(answer["transfer_id"])["state"] == "failed"


def test_pull_without_disk_serves_and_saves_nothing_when_its_only_source_is_killed_in_the_middle(
    served: Lab, proxy: Proxy, model: Model, reserve: Callable[[], int], tmp_path: Path
) -> None:
    source = served.ready_source(model.folder, *proxy.flags)
    proxy.hold_after(20 * MIB)
    port = reserve()
    target = served.pull("--save", tmp_path / "out", "--serve", "--port", port)
    proxy.wait_until_held()
    # Its data plane is up, and serves none of what is there so far.
    for path in ("/readyz", "/v1/tensors/layers.0.norm.weight", "/v1/export.safetensors"):
        assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 503
    source.kill()
    proxy.release()
    outcome = target.finish()
    answer = outcome.check(1)
    assert (answer["state"], answer["verified"]) == ("failed", False)
    assert outcome.error["code"] == "coverage_incomplete"
    missing = set(cast("list[str]", outcome.error["missing"]))
    # What is complete is not missing; what is missing is named, and so is who was lost.
    assert missing
    assert missing < set(model.tensors)
    assert "source_unreachable" in str(outcome.error["detail"])
    assert not (tmp_path / "out").exists()


def test_pull_b37_takes_the_rest_from_another_source_when_one_is_killed(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path
) -> None:
    doomed = served.ready_source(model.folder, *proxy.flags, "--instance-id", "a-doomed")
    served.ready_source(model.folder, "--instance-id", "b-healthy")
    proxy.hold_after(2 * MIB)
    target = served.pull("--save", tmp_path / "out")
    proxy.wait_until_held()
    doomed.kill()
    proxy.release()
    answer = target.finish().check(0)
    assert check_ready(answer, model) == (model.nbytes, 0)
    # The other one may have delivered everything before the first is given up for good.
    assert failures(answer).items() <= {"a-doomed": "source_unreachable"}.items()
    given = {str(item["instance_id"]): item["bytes"] for item in cast("list[Json]", answer["sources"])}
    assert given.keys() == {"a-doomed", "b-healthy"}
    assert sum(cast("list[int]", list(given.values()))) == model.nbytes
    check_saved(tmp_path / "out", model.tensors)


def test_pull_b37_fences_off_a_source_that_restarted_on_the_same_port_in_the_middle(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path
) -> None:
    flags = (*proxy.flags, "--instance-id", "phoenix")
    first = served.ready_source(model.folder, *flags)
    proxy.hold_after(20 * MIB)
    target = served.pull("--checkpoint", model.folder, "--save", tmp_path / "out")
    proxy.wait_until_held()
    first.kill()
    served.ready_source(model.folder, *flags)
    asked_before = len(proxy.reads)
    proxy.release()
    answer = target.finish().check(0)
    peer, disk = check_ready(answer, model)
    assert peer > 0
    assert disk > 0
    # It was asked again, and the new process knows nothing of the old ticket.
    assert len(proxy.reads) > asked_before
    assert failures(answer) == {"phoenix": "ticket_invalid"}
    check_saved(tmp_path / "out", model.tensors)


def test_pull_takes_from_the_new_generation_of_a_source_that_restarted(
    served: Lab, small: Model, reserve: Callable[[], int], tmp_path: Path
) -> None:
    flags = ("--port", reserve(), "--instance-id", "phoenix")
    served.ready_source(small.folder, *flags).kill()
    served.ready_source(small.folder, *flags)
    answer = served.pull("--save", tmp_path / "out").finish().check(0)
    assert check_ready(answer, small) == (small.nbytes, 0)
    assert failures(answer) == {}
    check_saved(tmp_path / "out", small.tensors)


def test_source_gives_way_to_a_newer_process_of_its_name(lab: Lab, small: Model) -> None:
    lab.serve("--lease-s", 0.3)
    older = lab.ready_source(small.folder, "--instance-id", "twin")
    lab.ready_source(small.folder, "--instance-id", "twin")
    outcome = older.finish()
    assert outcome.code == 1
    assert [line for line in outcome.lines if '"conflict"' in line and "twin" in line]


def test_source_serves_two_targets_at_once(served: Lab, proxy: Proxy, model: Model, tmp_path: Path) -> None:
    served.ready_source(model.folder, *proxy.flags)
    proxy.hold_after(MIB)
    first = served.pull("--save", tmp_path / "first")
    second = served.pull("--save", tmp_path / "second")
    # Both are being served before either can end.
    proxy.wait_for_reads(from_targets=2)
    proxy.release()
    for target, folder in ((first, "first"), (second, "second")):
        assert check_ready(target.finish().check(0), model) == (model.nbytes, 0)
        check_saved(tmp_path / folder, model.tensors)


def test_pull_b37_takes_from_a_former_target_when_the_first_source_is_gone(
    served: Lab, small: Model, tmp_path: Path
) -> None:
    first = served.ready_source(small.folder, "--instance-id", "first")
    relay = served.pull("--serve", "--instance-id", "relay")
    ready = relay.line()
    assert (ready["ready"], ready["instance_id"]) == (True, "relay")
    assert check_ready(cast(Json, ready["pull"]), small) == (small.nbytes, 0)
    with ServiceClient(served.service) as client:
        digests = {str(s["instance_id"]): digests_of(s) for s in client.sources(served.model)}
    assert digests["relay"] == digests["first"]
    first.kill()
    answer = served.pull("--save", tmp_path / "out").finish().check(0)
    assert check_ready(answer, small) == (small.nbytes, 0)
    assert answer["sources"] == [{"instance_id": "relay", "rank": 0, "bytes": small.nbytes}]
    check_saved(tmp_path / "out", small.tensors)
    assert relay.stop() == 0
