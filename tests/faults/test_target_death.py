"""Targets that die in the middle, and targets of the same name."""

from __future__ import annotations

from pathlib import Path

from tests.faults.checkpoints import MIB, check_saved
from tests.faults.conftest import Model
from tests.faults.processes import Lab, wait_until
from tests.faults.proxy import Proxy
from weightwire.service.client import ServiceClient


def states(lab: Lab) -> list[object]:
    """States of the transfers, newest first."""
    with ServiceClient(lab.service) as client:
        return [transfer["state"] for transfer in client.transfers()]


def test_source_serves_the_next_target_after_one_was_killed(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path
) -> None:
    """With one reader at a time, a reader that is never given back would keep everybody out."""
    served.ready_source(model.folder, *proxy.flags, "--max-readers", 1)
    proxy.hold_after(20 * MIB)
    target = served.pull("--save", tmp_path / "out", "--instance-id", "target", "--streams", 1)
    proxy.wait_until_held()
    target.kill()
    proxy.release()
    assert not (tmp_path / "out").exists()
    answer = served.pull("--save", tmp_path / "out", "--instance-id", "target").finish().check(0)
    assert (answer["bytes_peer"], answer["failures"]) == (model.nbytes, [])
    check_saved(tmp_path / "out", model.tensors)
    # The one of the process that died is over, since another has taken its place.
    wait_until(lambda: states(served) == ["ready", "cancelled"])


def test_pull_gives_way_to_a_newer_process_of_its_name(served: Lab, proxy: Proxy, model: Model, tmp_path: Path) -> None:
    served.ready_source(model.folder, *proxy.flags)
    proxy.hold_after(20 * MIB)
    older = served.pull("--save", tmp_path / "older", "--instance-id", "target")
    proxy.wait_until_held()
    newer = served.pull("--save", tmp_path / "newer", "--instance-id", "target")
    outcome = older.finish()
    assert outcome.check(3)["state"] == "cancelled"
    assert not (tmp_path / "older").exists()
    proxy.release()
    assert newer.finish().check(0)["bytes_peer"] == model.nbytes
    check_saved(tmp_path / "newer", model.tensors)
    assert states(served) == ["ready", "cancelled"]


def test_pull_leaves_no_half_written_file_when_it_is_killed_while_it_saves(
    served: Lab, model: Model, tmp_path: Path
) -> None:
    """The file of an earlier pull stays whole until the newer one is complete."""
    served.ready_source(model.folder)
    served.pull("--save", tmp_path / "out").finish().check(0)
    target = served.pull("--save", tmp_path / "out")
    wait_until(lambda: len(list((tmp_path / "out").iterdir())) > 1 or "ready" in states(served)[:1])
    target.kill()
    check_saved(tmp_path / "out", model.tensors)
