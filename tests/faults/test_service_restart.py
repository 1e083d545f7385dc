"""The service goes away, and comes back: bytes move all the same, and its record ends up right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.checkpoints import MIB, check_saved
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab, Running, wait_until
from tests.faults.proxy import Proxy
from weightwire.service.client import ServiceClient
from weightwire.transfer.errors import TransferError


class Plant:
    """A service with a lasting address, and a transfer that is held in its middle."""

    def __init__(self, lab: Lab, proxy: Proxy, model: Model, service_flags: tuple[object, ...]) -> None:
        self._lab = lab
        self._flags = service_flags
        self._service = lab.serve(*service_flags)
        lab.ready_source(model.folder, *proxy.flags, "--instance-id", "source")
        proxy.hold_after(20 * MIB)
        self.proxy = proxy

    def target(self, *flags: object) -> Running:
        target = self._lab.pull(*flags)
        self.proxy.wait_until_held()
        return target

    def kill_service(self) -> None:
        self._service.kill()

    def restart_service(self) -> None:
        self._service = self._lab.serve(*self._flags)

    def source_is_back(self) -> bool:
        with ServiceClient(self._lab.service) as client:
            states = {source["instance_id"]: source["state"] for source in client.sources(self._lab.model)}
        return states.get("source") == "ready"


@pytest.fixture
def sqlite(tmp_path: Path, reserve: Callable[[], int]) -> tuple[object, ...]:
    """Flags of a service that remembers."""
    return ("--port", reserve(), "--store", f"sqlite:{tmp_path / 'state.db'}", "--lease-s", 1.0)


@pytest.fixture
def memory(reserve: Callable[[], int]) -> tuple[object, ...]:
    """Flags of a service that forgets."""
    return ("--port", reserve(), "--store", "memory", "--lease-s", 1.0)


def check_peer(answer: Json, model: Model, *, peer: int | None = None) -> None:
    expected = model.nbytes if peer is None else peer
    assert (answer["state"], answer["bytes_peer"], answer["bytes_disk"]) == ("ready", expected, model.nbytes - expected)


def test_transfer_goes_on_while_the_service_restarts(
    lab: Lab, proxy: Proxy, model: Model, sqlite: tuple[object, ...], tmp_path: Path
) -> None:
    plant = Plant(lab, proxy, model, sqlite)
    target = plant.target("--save", tmp_path / "out")
    plant.kill_service()
    plant.restart_service()
    proxy.release()
    answer = target.finish().check(0)
    check_peer(answer, model)
    check_saved(tmp_path / "out", model.tensors)
    recorded = lab.status(answer["transfer_id"])
    check_peer(recorded, model)
    assert recorded["bytes_total"] == model.nbytes


def test_transfer_that_ends_while_the_service_is_away_is_recorded_when_it_is_back(
    lab: Lab, proxy: Proxy, model: Model, sqlite: tuple[object, ...], tmp_path: Path
) -> None:
    plant = Plant(lab, proxy, model, sqlite)
    target = plant.target("--save", tmp_path / "out")
    plant.kill_service()
    proxy.release()
    wait_until(lambda: proxy.passed_bytes > model.nbytes)
    plant.restart_service()
    answer = target.finish().check(0)
    check_peer(answer, model)
    check_peer(lab.status(answer["transfer_id"]), model)
    check_saved(tmp_path / "out", model.tensors)


def test_restarted_service_knows_its_instances_and_grants_from_them(
    lab: Lab, small: Model, sqlite: tuple[object, ...], tmp_path: Path
) -> None:
    service = lab.serve(*sqlite)
    lab.ready_source(small.folder, "--instance-id", "source")
    first = lab.pull().finish().check(0)
    service.kill()
    lab.serve(*sqlite)
    # At once, before anybody has renewed a lease.
    answer = lab.pull("--save", tmp_path / "out").finish().check(0)
    check_peer(answer, small)
    check_peer(lab.status(first["transfer_id"]), small)
    check_saved(tmp_path / "out", small.tensors)


def test_transfer_ends_ready_although_a_restarted_service_has_forgotten_it(
    lab: Lab, proxy: Proxy, model: Model, memory: tuple[object, ...], tmp_path: Path
) -> None:
    plant = Plant(lab, proxy, model, memory)
    target = plant.target("--save", tmp_path / "out")
    plant.kill_service()
    plant.restart_service()
    # The source is known again, and has the new service's keys.
    wait_until(plant.source_is_back)
    proxy.release()
    answer = target.finish().check(0)
    check_peer(answer, model)
    check_saved(tmp_path / "out", model.tensors)
    with ServiceClient(lab.service) as client, pytest.raises(TransferError, match="not known"):
        client.transfer(str(answer["transfer_id"]))


def test_transfer_ends_ready_although_the_service_never_comes_back(
    lab: Lab, proxy: Proxy, model: Model, memory: tuple[object, ...], tmp_path: Path
) -> None:
    plant = Plant(lab, proxy, model, memory)
    target = plant.target("--save", tmp_path / "out")
    plant.kill_service()
    proxy.release()
    outcome = target.finish()
    check_peer(outcome.check(0), model)
    assert "could not be reported" in " ".join(outcome.log.split())
    check_saved(tmp_path / "out", model.tensors)


def test_source_starts_again_where_the_service_is_away_and_publishes_when_it_is_back(
    lab: Lab, small: Model, memory: tuple[object, ...], tmp_path: Path
) -> None:
    service = lab.serve(*memory)
    lab.ready_source(small.folder)
    service.kill()
    lab.serve(*memory)
    with ServiceClient(lab.service) as client:
        wait_until(lambda: [source["state"] for source in client.sources(lab.model)] == ["ready"])
    check_peer(lab.pull("--save", tmp_path / "out").finish().check(0), small)
    check_saved(tmp_path / "out", small.tensors)
