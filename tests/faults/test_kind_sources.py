"""Sources that give no more than they were told to, drain when they stop, and serve from a process of their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import cast

import httpx

from tests.faults.checkpoints import DECODER, check_saved, decoder, write_checkpoint
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab, Running, wait_until
from tests.faults.proxy import Proxy, flipped
from tests.faults.test_source_death import check_ready, failures
from tests.faults.test_wire_damage import HEADER_BYTES
from weightwire.service.client import ServiceClient


def states(lab: Lab) -> dict[str, object]:
    """State of each instance of the model that has a URL."""
    with ServiceClient(lab.service) as client:
        return {str(source["instance_id"]): source["state"] for source in client.sources(lab.model)}


def newest(lab: Lab) -> Json:
    with ServiceClient(lab.service) as client:
        found = client.transfers()
    return found[0] if found else {"bytes_peer": 0}


def test_source_that_is_stopped_finishes_its_readers_and_the_other_one_gives_the_rest(
    served: Lab, model: Model, tmp_path: Path
) -> None:
    leaving = served.ready_source(model.folder, "--instance-id", "a-leaving", "--max-rate", "8MB", "--drain-s", 30)
    served.ready_source(model.folder, "--instance-id", "b-staying", "--max-rate", "16MB")
    target = served.pull("--save", tmp_path / "out")
    wait_until(lambda: cast(int, newest(served)["bytes_peer"]) > 0)
    assert leaving.stop() == 0, leaving.log
    assert states(served).keys() & {"a-leaving", "b-staying"} == {"b-staying"}
    answer = target.finish().check(0)
    assert check_ready(answer, model) == (model.nbytes, 0)
    # One that comes just when the port is closed finds nobody there.
    assert set(failures(answer).items()) <= {("a-leaving", "source_leaving"), ("a-leaving", "source_unreachable")}
    given = {str(item["instance_id"]): cast(int, item["bytes"]) for item in cast("list[Json]", answer["sources"])}
    assert given.keys() == {"a-leaving", "b-staying"}
    assert sum(given.values()) == model.nbytes
    check_saved(tmp_path / "out", model.tensors)


def test_source_that_is_stopped_cuts_its_readers_off_when_their_time_is_over(
    served: Lab, model: Model, tmp_path: Path
) -> None:
    leaving = served.ready_source(model.folder, "--max-rate", "4MB", "--drain-s", 0)
    target = served.pull("--checkpoint", model.folder, "--save", tmp_path / "out")
    wait_until(lambda: cast(int, newest(served)["bytes_peer"]) > 0)
    assert leaving.stop() == 0, leaving.log
    peer, disk = check_ready(target.finish().check(0), model)
    assert peer > 0
    assert disk > 0
    check_saved(tmp_path / "out", model.tensors)


def test_limits_of_a_running_source_are_set_shown_and_taken_back(lab: Lab, small: Model) -> None:
    lab.serve("--lease-s", 0.3)
    source = lab.source(small.folder, "--instance-id", "s", "--max-readers", 3, "--max-rate", "50MB")
    tensor = f"{source.line()['url']}/v1/tensors/{next(iter(small.tensors))}"

    def limit(*flags: object) -> Json:
        return lab.run("limit", "s", *flags, "--service", lab.service, "--json").check(0)

    assert limit() == {"instance_id": "s", "max_readers": None, "max_bytes_per_s": None, "error": None}
    assert limit("--max-readers", 0)["max_readers"] == 0
    assert limit("--max-rate", "1.5MiB/s") == {
        "instance_id": "s", "max_readers": 0, "max_bytes_per_s": 3 << 19, "error": None,
    }  # fmt: skip
    wait_until(lambda: httpx.get(tensor).status_code == 503)
    assert states(lab) == {"s": "paused"}
    assert limit("--reset") == {"instance_id": "s", "max_readers": None, "max_bytes_per_s": None, "error": None}
    wait_until(lambda: httpx.get(tensor).status_code == 200)
    assert limit("--max-rate", "unlimited", "--max-readers", 1)["max_bytes_per_s"] == "unlimited"
    assert check_ready(lab.pull().finish().check(0), small) == (small.nbytes, 0)
    for flags, code in ((("--max-rate", "0"), 2), (("--max-rate", "fast"), 2)):
        outcome = lab.run("limit", "s", *flags, "--service", lab.service, "--json")
        assert (outcome.code, outcome.error["code"]) == (code, "settings_invalid")
    outcome = lab.run("limit", "nobody", "--service", lab.service, "--json")
    assert (outcome.code, outcome.error["code"]) == (1, "not_found")


def server_process_of(running: Running) -> int | None:
    """The only child of a command, whichever thread started it; None while there is none."""
    lists = Path(f"/proc/{running.pid}/task").glob("*/children")
    children = [int(child) for each in lists for child in each.read_text().split()]
    return children[0] if children else None


def replacement_of(running: Running, former: int) -> int:
    """The server process that took the place of another one."""
    wait_until(lambda: server_process_of(running) not in (None, former))
    child = server_process_of(running)
    assert child is not None
    return child


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() != b""


def test_server_process_dies_comes_back_with_the_same_weights_and_ends_with_its_source(
    served: Lab, small: Model, tmp_path: Path
) -> None:
    source = served.ready_source(small.folder, "--instance-id", "s", "--server-process")
    relay = served.pull("--serve", "--server-process", "--instance-id", "r")
    assert check_ready(cast(Json, relay.line()["pull"]), small) == (small.nbytes, 0)
    former = server_process_of(source)
    assert former is not None
    os.kill(former, signal.SIGKILL)
    child = replacement_of(source, former)
    assert check_ready(served.pull("--save", tmp_path / "out").finish().check(0), small) == (small.nbytes, 0)
    check_saved(tmp_path / "out", small.tensors)
    assert relay.stop() == 0, relay.log
    assert source.stop() == 0, source.log
    assert not is_there(child)


def test_server_process_serves_ranks_that_were_loaded_into_memory_of_torch(served: Lab, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", decoder(), DECODER)
    source = served.ready_source(folder, "--server-process", "--tp", 2)
    answer = served.pull("--tp", 1).finish().check(0)
    assert (answer["state"], answer["bytes_disk"], answer["verified"]) == ("ready", 0, True)
    assert source.stop() == 0, source.log


def test_source_whose_server_process_dies_twice_says_so_and_ends(served: Lab, small: Model) -> None:
    source = served.ready_source(small.folder, "--instance-id", "s", "--server-process")
    former = server_process_of(source)
    assert former is not None
    os.kill(former, signal.SIGKILL)
    os.kill(replacement_of(source, former), signal.SIGKILL)
    outcome = source.finish()
    assert outcome.code == 1
    assert "source_failed" in outcome.lines[-1]
    assert "s" not in states(served)


def test_source_that_two_targets_found_damaged_is_granted_to_nobody(served: Lab, proxy: Proxy, model: Model) -> None:
    served.ready_source(model.folder, *proxy.flags, "--instance-id", "faulty")
    proxy.always = flipped(HEADER_BYTES + 5000)
    for number in range(2):
        assert states(served)["faulty"] == ("quarantined" if number else "ready")
        answer = served.pull("--checkpoint", model.folder).finish().check(0)
        assert failures(answer) == {"faulty": "checksum_mismatch"}
    asked = len(proxy.reads)
    answer = served.pull("--checkpoint", model.folder).finish().check(0)
    assert check_ready(answer, model) == (0, model.nbytes)
    assert len(proxy.reads) == asked
    text = httpx.get(f"{served.service}/metrics").text
    assert 'weightwire_quarantined{code="checksum_mismatch",instance_id="faulty"} 1.0' in text
