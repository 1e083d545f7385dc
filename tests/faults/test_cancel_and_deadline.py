"""Transfers that somebody stops, or whose time is over."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import cast

import pytest

from tests.faults.checkpoints import MIB
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab, Outcome, Running, wait_until
from tests.faults.proxy import Proxy
from weightwire.service.client import ServiceClient


@pytest.fixture
def held(served: Lab, proxy: Proxy, model: Model, tmp_path: Path) -> Running:
    """A target in the middle of its transfer, which does not go on."""
    served.ready_source(model.folder, *proxy.flags)
    proxy.hold_after(20 * MIB)
    target = served.pull("--save", tmp_path / "out", "--instance-id", "target")
    proxy.wait_until_held()
    return target


def running_transfer(lab: Lab) -> str:
    """The one transfer, once the service has heard that it receives."""
    with ServiceClient(lab.service) as client:
        wait_until(lambda: [transfer["state"] for transfer in client.transfers()] == ["receiving"])
        (transfer,) = client.transfers()
    return str(transfer["transfer_id"])


def recorded(lab: Lab) -> Json:
    """The one transfer, with its error unpacked."""
    with ServiceClient(lab.service) as client:
        (transfer,) = client.transfers()
        assert "target" not in {instance["instance_id"] for instance in client.instances()}
    return transfer


def check_stopped(outcome: Outcome, *, code: int, state: str, error: str, folder: Path) -> None:
    answer = outcome.check(code)
    assert (answer["state"], answer["verified"], outcome.error["code"]) == (state, False, error)
    assert not (folder / "out").exists()


def test_cancel_stops_a_transfer_in_the_middle(held: Running, served: Lab, tmp_path: Path) -> None:
    transfer_id = running_transfer(served)
    cancelled = served.run("cancel", transfer_id, "--service", served.service, "--json").check(0)
    assert cancelled == {"transfer_id": transfer_id, "state": "cancelled", "error": None}
    check_stopped(held.finish(), code=3, state="cancelled", error="cancelled", folder=tmp_path)
    transfer = recorded(served)
    assert (transfer["state"], cast(Json, transfer["error"])["code"]) == ("cancelled", "cancelled")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_pull_is_cancelled_by_a_signal(held: Running, served: Lab, tmp_path: Path, number: signal.Signals) -> None:
    held.send_signal(number)
    check_stopped(held.finish(), code=3, state="cancelled", error="cancelled", folder=tmp_path)
    transfer = recorded(served)
    assert (transfer["state"], cast(Json, transfer["error"])["code"]) == ("cancelled", "cancelled")


def test_pull_that_was_to_serve_is_cancelled_by_a_signal(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path
) -> None:
    served.ready_source(model.folder, *proxy.flags)
    proxy.hold_after(20 * MIB)
    target = served.pull("--serve", "--save", tmp_path / "out", "--instance-id", "target")
    proxy.wait_until_held()
    target.send_signal(signal.SIGTERM)
    check_stopped(target.finish(), code=3, state="cancelled", error="cancelled", folder=tmp_path)
    assert recorded(served)["state"] == "cancelled"


def test_pull_ends_at_its_deadline(served: Lab, proxy: Proxy, model: Model, tmp_path: Path) -> None:
    served.ready_source(model.folder, *proxy.flags)
    proxy.hold_after(20 * MIB)
    # The disk has everything, but time is over all the same.
    flags = ("--checkpoint", model.folder, "--save", tmp_path / "out", "--instance-id", "target")
    outcome = served.pull("--deadline-s", 1.5, *flags).finish()
    check_stopped(outcome, code=4, state="failed", error="deadline_exceeded", folder=tmp_path)
    transfer = recorded(served)
    assert (transfer["state"], cast(Json, transfer["error"])["code"]) == ("failed", "deadline_exceeded")


def test_load_ends_at_its_deadline(lab: Lab, model: Model, tmp_path: Path) -> None:
    outcome = lab.run("load", model.folder, "--deadline-s", 0.001, "--save", tmp_path / "out", "--json")
    outcome.check(4)
    assert outcome.error["code"] == "deadline_exceeded"
    assert not (tmp_path / "out").exists()


def test_cancel_leaves_a_transfer_that_has_ended_as_it_is(served: Lab, small: Model) -> None:
    served.ready_source(small.folder)
    transfer_id = served.pull().finish().check(0)["transfer_id"]
    answer = served.run("cancel", str(transfer_id), "--service", served.service, "--json").check(0)
    assert answer == {"transfer_id": transfer_id, "state": "ready", "error": None}


def test_cancel_of_an_unknown_transfer_fails(served: Lab) -> None:
    outcome = served.run("cancel", "no-such-transfer", "--service", served.service, "--json")
    outcome.check(1)
    assert outcome.error["code"] == "not_found"


def test_status_follows_a_transfer_until_it_ends(held: Running, served: Lab, proxy: Proxy, model: Model) -> None:
    transfer_id = running_transfer(served)
    following = served.start("status", transfer_id, "--follow", "--service", served.service, "--json")
    proxy.release()
    held.finish().check(0)
    answer = following.finish().check(0)
    assert (answer["state"], answer["bytes_peer"], answer["error"]) == ("ready", model.nbytes, None)
