"""Targets that join while others still receive: the source sends about one copy, whoever dies on the way."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import cast

import pytest

from tests.faults.checkpoints import MIB, check_saved
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab, Running, wait_until
from tests.faults.proxy import Proxy
from weightwire.service.client import ServiceClient


class Wave:
    """Joiners of one source, which stands behind a proxy; each joins once the one before it has its grant."""

    def __init__(self, lab: Lab, proxy: Proxy, model: Model, folder: Path) -> None:
        self.lab = lab
        self.proxy = proxy
        self.model = model
        self.folder = folder
        self.running: dict[str, Running] = {}
        lab.ready_source(model.folder, *proxy.flags, "--instance-id", "s")

    def join(self, name: str, *flags: object) -> Running:
        """Start a joiner that serves, and wait until it has been told from whom to take."""
        # By one stream, so that what is held back at the proxy is the end and no hole in the middle.
        flags = ("--streams", 1, "--instance-id", name, "--serve", "--save", self.folder / name, *flags)
        self.running[name] = self.lab.pull(*flags)
        wait_until(lambda: name in self.transfers())
        return self.running[name]

    def transfers(self) -> dict[str, Json]:
        """The transfers that there are, by target."""
        with ServiceClient(self.lab.service) as client:
            return {str(each["target_instance_id"]): each for each in client.transfers()}

    def feeders(self, name: str) -> list[tuple[str, bool]]:
        sources = cast("list[Json]", self.transfers()[name]["sources"])
        return [(str(source["instance_id"]), bool(source["relay"])) for source in sources]

    def wait_for_bytes(self, name: str, nbytes: int) -> None:
        """Wait until a joiner has reported so much as verified."""
        wait_until(lambda: cast(int, self.transfers()[name]["bytes_peer"]) >= nbytes)

    def check_ready(self, name: str) -> dict[str, int]:
        """Check that a joiner has everything, bit for bit; returns what it had from whom."""
        line = self.running[name].line()
        assert line.get("ready") is True, f"{line} {self.running[name].log}"
        check_saved(self.folder / name, self.model.tensors)
        pulled = cast(Json, line["pull"])
        assert (pulled["bytes_peer"], pulled["bytes_disk"]) == (self.model.nbytes, 0)
        return {str(each["instance_id"]): cast(int, each["bytes"]) for each in cast("list[Json]", pulled["sources"])}


@pytest.fixture
def wave(served: Lab, proxy: Proxy, model: Model, tmp_path: Path) -> Wave:
    return Wave(served, proxy, model, tmp_path)


# What headers, trailers and what was on its way when somebody died may come to.
SLACK_BYTES = 2 * MIB


def test_three_joiners_at_once_cost_the_source_one_copy(wave: Wave) -> None:
    wave.proxy.hold_after(MIB)
    for name in "abc":
        wave.join(name)
    assert wave.feeders("a") == [("s", False)]
    assert wave.feeders("b") == [("a", True), ("s", False)]
    assert wave.feeders("c") == [("b", True), ("a", True), ("s", False)]
    wave.proxy.wait_until_held()
    wave.proxy.release()
    assert wave.check_ready("a") == {"s": wave.model.nbytes}
    assert wave.check_ready("b") == {"a": wave.model.nbytes}
    assert wave.check_ready("c") == {"b": wave.model.nbytes}
    assert wave.proxy.passed_bytes < wave.model.nbytes + SLACK_BYTES
    shown = {name: transfer["state"] for name, transfer in wave.transfers().items()}
    assert shown == dict.fromkeys("abc", "ready")
    # Once ready, they are sources like any other, under the manifest of the first one.
    with ServiceClient(wave.lab.service) as client:
        held = {cast("list[Json]", source["ranks"])[0]["manifest_digest"] for source in client.sources(wave.lab.model)}
    assert len(held) == 1


def test_bytes_come_through_a_chain_while_the_source_still_sends(wave: Wave) -> None:
    """The last one has half of the model when the source has not sent more than that."""
    wave.proxy.hold_after(24 * MIB)
    for name in "abc":
        wave.join(name)
    wave.proxy.wait_until_held()
    wave.wait_for_bytes("c", 16 * MIB)
    assert wave.transfers()["a"]["state"] == "receiving"
    wave.proxy.release()
    for name in "abc":
        wave.check_ready(name)
    assert wave.proxy.passed_bytes < wave.model.nbytes + SLACK_BYTES


def test_joiner_that_is_late_joins_the_same_wave(wave: Wave) -> None:
    wave.proxy.hold_after(24 * MIB)
    wave.join("a")
    wave.proxy.wait_until_held()
    wave.join("late")
    wave.wait_for_bytes("late", 16 * MIB)
    wave.proxy.release()
    wave.check_ready("a")
    assert wave.check_ready("late") == {"a": wave.model.nbytes}
    assert wave.proxy.passed_bytes < wave.model.nbytes + SLACK_BYTES


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_chain_that_loses_its_middle_is_closed_by_the_one_before(wave: Wave, number: int) -> None:
    wave.proxy.hold_after(24 * MIB)
    for name in "abc":
        wave.join(name)
    wave.proxy.wait_until_held()
    wave.wait_for_bytes("c", 8 * MIB)
    wave.running["b"].send_signal(number)
    wave.proxy.release()
    wave.check_ready("a")
    given = wave.check_ready("c")
    assert given["b"] > 0
    assert given["a"] > 0
    assert "s" not in given
    assert wave.proxy.passed_bytes < wave.model.nbytes + SLACK_BYTES


def test_chain_that_loses_its_head_goes_back_to_the_source(wave: Wave) -> None:
    wave.proxy.hold_after(24 * MIB)
    for name in "abc":
        wave.join(name)
    wave.proxy.wait_until_held()
    wave.wait_for_bytes("c", 8 * MIB)
    wave.running["a"].kill()
    before = wave.proxy.passed_bytes
    wave.proxy.release()
    b = wave.check_ready("b")
    assert b["a"] + b["s"] == wave.model.nbytes
    assert wave.check_ready("c") == {"b": wave.model.nbytes}
    # What the dead one had, and nobody had from it yet, is all that goes out twice.
    assert wave.proxy.passed_bytes < before + b["s"] + SLACK_BYTES


def test_readers_of_a_relay_that_is_cancelled_go_elsewhere_at_once(wave: Wave) -> None:
    wave.proxy.hold_after(24 * MIB)
    for name in "ab":
        wave.join(name)
    wave.proxy.wait_until_held()
    wave.wait_for_bytes("b", 8 * MIB)
    with ServiceClient(wave.lab.service) as client:
        client.cancel(str(wave.transfers()["a"]["transfer_id"]))
    assert wave.running["a"].finish().code == 3
    wave.proxy.release()
    given = wave.check_ready("b")
    assert given["a"] + given["s"] == wave.model.nbytes
    assert given["a"] > 0


def test_target_that_is_not_to_relay_feeds_nobody(wave: Wave) -> None:
    wave.proxy.hold_after(MIB)
    wave.join("a", "--no-relay")
    wave.join("b")
    assert wave.feeders("b") == [("s", False)]
    wave.proxy.wait_until_held()
    wave.proxy.release()
    for name in "ab":
        assert wave.check_ready(name) == {"s": wave.model.nbytes}
