"""No source, no disk, no service: what is left is used, and what is missing is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from tests.faults.checkpoints import MIB, check_saved, content, write_checkpoint
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab, wait_until
from tests.faults.proxy import Proxy, answered
from weightwire.service.client import ServiceClient


def test_pull_without_source_and_disk_fails(served: Lab, tmp_path: Path) -> None:
    outcome = served.pull("--save", tmp_path / "out", "--serve").finish()
    answer = outcome.check(1)
    assert (answer["state"], answer["verified"]) == ("failed", False)
    assert outcome.error["code"] == "not_found"
    assert served.model in str(outcome.error["detail"])
    assert not (tmp_path / "out").exists()
    recorded = served.status(answer["transfer_id"])
    assert (recorded["state"], cast(Json, recorded["error"])["code"]) == ("failed", "not_found")


def test_pull_without_source_reads_from_disk(served: Lab, small: Model, tmp_path: Path) -> None:
    answer = served.pull("--checkpoint", small.folder, "--save", tmp_path / "out").finish().check(0)
    assert (answer["state"], answer["transport"]) == ("ready", None)
    assert (answer["bytes_peer"], answer["bytes_disk"]) == (0, small.nbytes)
    assert cast(Json, answer["tensors"])["disk"] == len(small.tensors)
    check_saved(tmp_path / "out", small.tensors)
    assert served.status(answer["transfer_id"])["bytes_disk"] == small.nbytes


def test_pull_without_service_reads_from_disk(
    lab: Lab, small: Model, reserve: Callable[[], int], tmp_path: Path
) -> None:
    lab.service = f"http://127.0.0.1:{reserve()}"
    answer = lab.pull("--checkpoint", small.folder, "--save", tmp_path / "out").finish().check(0)
    assert (answer["transfer_id"], answer["state"], answer["bytes_disk"]) == (None, "ready", small.nbytes)
    check_saved(tmp_path / "out", small.tensors)


def test_pull_without_service_serves_as_soon_as_it_is_there(
    lab: Lab, small: Model, reserve: Callable[[], int], tmp_path: Path
) -> None:
    port = reserve()
    lab.service = f"http://127.0.0.1:{port}"
    first = lab.pull("--checkpoint", small.folder, "--serve")
    assert first.line()["ready"] is True
    lab.serve("--port", port)
    with ServiceClient(lab.service) as client:
        wait_until(lambda: [source["state"] for source in client.sources(lab.model)] == ["ready"])
    answer = lab.pull("--save", tmp_path / "out").finish().check(0)
    assert (answer["bytes_peer"], answer["bytes_disk"]) == (small.nbytes, 0)
    check_saved(tmp_path / "out", small.tensors)
    assert first.stop() == 0


def test_pull_without_service_and_disk_fails(lab: Lab, reserve: Callable[[], int], tmp_path: Path) -> None:
    lab.service = f"http://127.0.0.1:{reserve()}"
    outcome = lab.pull("--save", tmp_path / "out").finish()
    answer = outcome.check(1)
    assert (answer["transfer_id"], answer["state"]) == (None, "failed")
    assert outcome.error["code"] == "service_unreachable"
    assert lab.service in str(outcome.error["detail"])
    assert not (tmp_path / "out").exists()


def test_source_without_service_fails(lab: Lab, small: Model, reserve: Callable[[], int]) -> None:
    lab.service = f"http://127.0.0.1:{reserve()}"
    outcome = lab.source(small.folder).finish()
    outcome.check(1)
    assert outcome.error["code"] == "service_unreachable"


def test_pull_b38_takes_from_disk_what_the_source_leaves_out(served: Lab, small: Model, tmp_path: Path) -> None:
    served.ready_source(small.folder, "--exclude", "*.norm.weight", "--exclude", "*.scale")
    left_out = {name: tensor for name, tensor in small.tensors.items() if not name.endswith("mlp.weight")}
    disk = sum(len(tensor.data) for tensor in left_out.values())
    answer = served.pull("--checkpoint", small.folder, "--save", tmp_path / "out").finish().check(0)
    assert (answer["bytes_peer"], answer["bytes_disk"]) == (small.nbytes - disk, disk)
    tensors = {"identical": len(small.tensors) - len(left_out), "reshard": 0, "disk": len(left_out), "constant": 0}
    assert answer["tensors"] == tensors
    check_saved(tmp_path / "out", small.tensors)


def test_pull_b38_names_all_that_the_source_leaves_out_before_anything_moves(
    served: Lab, proxy: Proxy, small: Model, tmp_path: Path
) -> None:
    served.ready_source(small.folder, *proxy.flags, "--exclude", "*.norm.weight")
    outcome = served.pull("--save", tmp_path / "out").finish()
    outcome.check(1)
    assert outcome.error["code"] == "coverage_incomplete"
    expected = {name for name in small.tensors if name.endswith("norm.weight")}
    assert set(cast("list[str]", outcome.error["missing"])) == expected
    assert proxy.reads == []
    assert not (tmp_path / "out").exists()


def test_plan_shows_what_would_be_missing(served: Lab, small: Model) -> None:
    served.ready_source(small.folder, "--exclude", "*.norm.weight")
    answer = served.run("plan", *served.common(), "--checkpoint", small.folder).check(0)
    ways = cast("dict[str, int]", answer["ways"])
    assert (ways["identical"], ways["disk"]) == (16, 8)


def test_source_that_does_not_renew_leaves_the_matching(lab: Lab, small: Model) -> None:
    lab.serve("--lease-s", 0.4)
    lab.ready_source(small.folder, "--instance-id", "quiet").kill()
    with ServiceClient(lab.service) as client:
        wait_until(lambda: client.sources(lab.model)[0]["state"] == "expired")
    outcome = lab.pull().finish()
    outcome.check(1)
    assert outcome.error["code"] == "not_found"
    assert "quiet" in str(outcome.error["detail"])


@pytest.mark.parametrize("origin", ["from the start", "in the middle"])
def test_pull_refuses_a_disk_that_holds_other_bytes_than_the_lost_source(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path, origin: str
) -> None:
    """Two trainings of one model: half of the one and half of the other is neither."""
    other = {name: content(tensor.tag, *tensor.shape, seed=99) for name, tensor in model.tensors.items()}
    disk = write_checkpoint(tmp_path / "other", other)
    source = served.ready_source(model.folder, *proxy.flags)
    if origin == "from the start":
        source.kill()
    proxy.hold_after(20 * MIB)
    target = served.pull("--checkpoint", disk, "--save", tmp_path / "out")
    if origin == "in the middle":
        proxy.wait_until_held()
        source.kill()
        proxy.release()
    outcome = target.finish()
    outcome.check(1)
    assert outcome.error["code"] == "integrity_failed"
    assert outcome.error["tensor"] in model.tensors
    assert not (tmp_path / "out").exists()


PAGE = (b"<html>Bad gateway</html>", ("Content-Type", "text/html"))


@pytest.fixture
def behind_gateway(lab: Lab, proxy: Proxy) -> Lab:
    """A lab whose clients reach the service through the proxy, which stands before the service and not a source."""
    lab.serve(*proxy.flags)
    assert lab.service == proxy.url
    return lab


def test_pull_reads_from_disk_when_the_gateway_finds_no_service(
    behind_gateway: Lab, proxy: Proxy, small: Model, tmp_path: Path
) -> None:
    proxy.other = answered("502 Bad Gateway", *PAGE)
    answer = behind_gateway.pull("--checkpoint", small.folder, "--save", tmp_path / "out").finish().check(0)
    assert (answer["transfer_id"], answer["bytes_disk"]) == (None, small.nbytes)
    check_saved(tmp_path / "out", small.tensors)
    outcome = behind_gateway.pull().finish()
    outcome.check(1)
    assert outcome.error["code"] == "service_unreachable"
    assert "502" in str(outcome.error["detail"])


@pytest.mark.parametrize("status", ["200 OK", "403 Forbidden", "302 Found"])
def test_command_b44_takes_no_page_for_an_answer_of_the_service(
    behind_gateway: Lab, proxy: Proxy, small: Model, status: str
) -> None:
    proxy.other = answered(status, *PAGE)
    for running in (behind_gateway.pull("--checkpoint", small.folder), behind_gateway.source(small.folder)):
        outcome = running.finish()
        outcome.check(1)
        assert outcome.error["code"] == "source_refused"
        assert status[:3] in str(outcome.error["detail"])
        assert proxy.url in str(outcome.error["detail"])
        assert "gateway" not in outcome.log + "".join(outcome.lines)


def test_pull_fails_at_once_when_it_could_not_save(served: Lab, proxy: Proxy, small: Model, tmp_path: Path) -> None:
    served.ready_source(small.folder, *proxy.flags)
    (tmp_path / "out").write_text("not a folder")
    outcome = served.pull("--save", tmp_path / "out").finish()
    assert outcome.check(2)["transfer_id"] is None
    assert outcome.error["code"] == "settings_invalid"
    assert str(tmp_path / "out") in str(outcome.error["detail"])


def test_pull_does_not_read_a_disk_that_changed_under_it(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path
) -> None:
    disk = write_checkpoint(tmp_path / "disk", model.tensors)
    source = served.ready_source(model.folder, *proxy.flags)
    proxy.hold_after(20 * MIB)
    target = served.pull("--checkpoint", disk, "--save", tmp_path / "out")
    proxy.wait_until_held()
    write_checkpoint(disk, {name: content(t.tag, *t.shape, seed=99) for name, t in model.tensors.items()})
    source.kill()
    proxy.release()
    outcome = target.finish()
    outcome.check(1)
    assert outcome.error["code"] == "checkpoint_invalid"
    assert "changed" in str(outcome.error["detail"])
    assert not (tmp_path / "out").exists()
