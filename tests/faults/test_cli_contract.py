"""What scripts may rely on: one JSON object, ready lines, exit codes, signals, variables. Source: docs/cli.md."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import cast

import httpx
import pytest

from tests.faults.checkpoints import MIB, check_saved
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab, Running
from tests.faults.proxy import Proxy
from weightwire.service.client import ServiceClient

PULL = {"transfer_id", "state", "seconds", "verified", "transport", "bytes_peer", "bytes_disk", "tensors", "sources",
        "ranks", "error"}  # fmt: skip
PULL_RANK = PULL - {"transfer_id", "ranks", "error"} | {"rank"}
WAYS = {"identical", "reshard", "disk", "constant"}
LOAD = {"seconds", "bytes_read", "peak_rss_bytes", "tensors", "ranks", "error"}
PLAN = {"seconds_trace", "seconds_plan", "copies", "segments", "bytes", "ways", "bytes_per_source_rank",
        "bytes_per_target_rank", "uncovered", "opaque", "error"}  # fmt: skip
BENCH = {"bytes", "seconds", "cpu_seconds", "verified", "peak_extra_rss_bytes"}


def test_pull_prints_the_members_of_its_contract(served: Lab, small: Model, tmp_path: Path) -> None:
    served.ready_source(small.folder, "--instance-id", "source", "--exclude", "*.scale")
    flags = ("--checkpoint", small.folder, "--save", tmp_path / "out")
    answer = served.run("pull", *served.common(), *flags, fresh=True).check(0)
    assert answer.keys() >= PULL
    assert (answer["state"], answer["verified"], answer["transport"], answer["error"]) == ("ready", True, "http", None)
    scales = 8 * 4
    assert (answer["bytes_peer"], answer["bytes_disk"]) == (small.nbytes - scales, scales)
    assert answer["tensors"] == {"identical": 16, "reshard": 0, "disk": 8, "constant": 0}
    assert answer["sources"] == [{"instance_id": "source", "rank": 0, "bytes": small.nbytes - scales}]
    (rank,) = cast("list[Json]", answer["ranks"])
    assert rank.keys() >= PULL_RANK
    assert rank["rank"] == 0
    assert {key: rank[key] for key in PULL_RANK - {"rank"}} == {key: answer[key] for key in PULL_RANK - {"rank"}}
    assert isinstance(answer["seconds"], float)
    check_saved(tmp_path / "out", small.tensors)


def test_pull_prints_the_same_members_when_it_fails(served: Lab) -> None:
    outcome = served.run("pull", "--service", served.service, "--model", "m", "--json")
    answer = outcome.check(1)
    assert answer.keys() >= PULL
    assert cast(Json, answer["tensors"]).keys() == WAYS
    assert outcome.error.keys() >= {"code", "detail"}
    assert (answer["state"], answer["verified"], answer["transport"]) == ("failed", False, None)


def test_load_prints_the_members_of_its_contract(lab: Lab, small: Model) -> None:
    answer = lab.run("load", small.folder, "--exclude", "*.scale", "--json").check(0)
    assert answer.keys() >= LOAD
    assert answer["bytes_read"] == small.nbytes - 8 * 4
    assert answer["tensors"] == {"loaded": 16, "skipped": 8, "constant": 0}
    assert cast(int, answer["peak_rss_bytes"]) > small.nbytes
    (rank,) = cast("list[Json]", answer["ranks"])
    assert (rank["rank"], rank["bytes_read"]) == (0, answer["bytes_read"])


def test_plan_prints_the_members_of_its_contract(served: Lab, small: Model) -> None:
    served.ready_source(small.folder, "--exclude", "*.scale")
    answer = served.run("plan", *served.common(), "--checkpoint", small.folder).check(0)
    assert answer.keys() >= PLAN
    scales = 8 * 4
    assert answer["ways"] == {"identical": 16, "reshard": 0, "disk": 8, "constant": 0}
    assert (answer["bytes"], answer["segments"]) == (small.nbytes, answer["copies"])
    assert answer["bytes_per_source_rank"] == {"0": small.nbytes - scales}
    assert answer["bytes_per_target_rank"] == {"0": small.nbytes}
    assert (answer["uncovered"], answer["opaque"], answer["error"]) == ([], [], None)
    assert isinstance(answer["seconds_plan"], float)


def test_plan_of_an_unknown_model_fails_in_json(served: Lab) -> None:
    outcome = served.run("plan", "--service", served.service, "--model", "unknown", "--json")
    outcome.check(1)
    assert outcome.error["code"] == "not_found"


def test_bench_pull_prints_the_members_of_its_contract(lab: Lab) -> None:
    answer = lab.run("bench", "pull", "--mib", 16, "--streams", 2, "--json", fresh=True).check(0)
    assert answer.keys() >= BENCH
    assert (answer["bytes"], answer["verified"]) == (16 * MIB, True)
    assert all(cast(float, answer[key]) > 0 for key in ("seconds", "cpu_seconds"))


def test_status_prints_instances_and_transfers(served: Lab, small: Model) -> None:
    served.ready_source(small.folder, "--instance-id", "source")
    transfer_id = served.pull().finish().check(0)["transfer_id"]
    answer = served.run("status", "--service", served.service, "--json").check(0)
    assert answer["error"] is None
    assert [item["instance_id"] for item in cast("list[Json]", answer["instances"])] == ["source"]
    assert [item["transfer_id"] for item in cast("list[Json]", answer["transfers"])] == [transfer_id]
    one = served.status(transfer_id)
    assert one.keys() >= {"transfer_id", "state", "bytes_total", "bytes_peer", "bytes_disk", "ranks", "error"}


def test_status_of_an_unknown_transfer_fails_in_json(served: Lab) -> None:
    outcome = served.run("status", "unknown", "--service", served.service, "--json")
    outcome.check(1)
    assert outcome.error["code"] == "not_found"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("pull",), id="an option is missing"),
        pytest.param(("pull", "--model", "m", "--no-such-option"), id="an unknown option"),
        pytest.param(("pull", "--model", "m", "--streams", "0"), id="a number out of range"),
        pytest.param(("pull", "--model", "m", "--deadline-s", "soon"), id="no number"),
        pytest.param(("no-such-command",), id="an unknown command"),
        pytest.param(("load",), id="an argument is missing"),
        pytest.param(("pull", "--model", "m", "--log-level", "loud"), id="an unknown log level"),
        pytest.param(("serve", "--store", "tape"), id="an unknown store"),
        pytest.param(("pull", "--model", "m", "--service", "ftp://x"), id="a service that is no HTTP address"),
        pytest.param(("source", "/nowhere", "--model", "m", "--tls-cert", "x.pem"), id="a certificate without its key"),
        pytest.param(("source", "FOLDER", "--model", "m", "--host", "0.0.0.0"), id="tickets in clear on a network"),
        pytest.param(("source", "FOLDER", "--model", "m", "--advertise", "nonsense"), id="an address that is none"),
        pytest.param(("serve", "--advertise", "nonsense"), id="an address of the service that is none"),
    ],
)
def test_command_exits_2_on_wrong_usage(lab: Lab, small: Model, arguments: tuple[str, ...]) -> None:
    outcome = lab.run(*(small.folder if word == "FOLDER" else word for word in arguments), "--json")
    outcome.check(2)
    assert outcome.error.keys() >= {"code", "detail"}
    assert str(outcome.error["detail"])


def test_command_without_json_leaves_stdout_to_people(lab: Lab) -> None:
    outcome = lab.run("pull", "--no-such-option", fresh=True)
    assert (outcome.code, outcome.lines) == (2, [])
    assert "--no-such-option" in outcome.log
    assert "Traceback" not in outcome.log


def test_failure_without_json_is_said_on_stderr(served: Lab) -> None:
    outcome = served.run("pull", "--service", served.service, "--model", "m")
    assert (outcome.code, outcome.lines) == (1, [])
    assert "not_found" in outcome.log
    assert "Traceback" not in outcome.log


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("status",), ("bench", "pull")])
def test_command_refuses_a_variable_of_ours_that_nobody_knows(lab: Lab, command: tuple[str, ...]) -> None:
    outcome = lab.run(*command, "--json", env={"WEIGHTWIRE_TOKN": "x"})
    outcome.check(2)
    assert outcome.error["code"] == "settings_invalid"
    assert "WEIGHTWIRE_TOKN" in str(outcome.error["detail"])
    assert "WEIGHTWIRE_TOKEN" in str(outcome.error["detail"])


def test_variables_stand_in_for_flags_and_flags_win(served: Lab, small: Model, tmp_path: Path) -> None:
    environment = {
        "WEIGHTWIRE_SERVICE": served.service,
        "WEIGHTWIRE_MODEL": "from-variable",
        "WEIGHTWIRE_INSTANCE_ID": "from-variable",
        "WEIGHTWIRE_CHECKPOINT": str(small.folder),
    }
    source = served.start("source", small.folder, "--json", "--instance-id", "from-flag", env=environment)
    assert source.line()["instance_id"] == "from-flag"
    outcome = served.run("pull", "--json", "--save", tmp_path / "out", env=environment)
    answer = outcome.check(0)
    assert answer["sources"] == [{"instance_id": "from-flag", "rank": 0, "bytes": small.nbytes}]
    with ServiceClient(served.service) as client:
        assert [model["instance_id"] for model in client.sources("from-variable")] == ["from-flag"]


@pytest.mark.parametrize("command", ["serve", "source", "pull --serve"])
def test_port_that_is_taken_is_named(served: Lab, small: Model, command: str) -> None:
    port = int(served.service.rpartition(":")[2])
    outcome = {
        "serve": lambda: served.run("serve", "--port", port, "--json"),
        "source": lambda: served.source(small.folder, "--port", port).finish(),
        "pull --serve": lambda: served.pull("--checkpoint", small.folder, "--serve", "--port", port).finish(),
    }[command]()
    outcome.check(2)
    assert outcome.error["code"] == "settings_invalid"
    assert str(port) in str(outcome.error["detail"])
    assert outcome.error["port"] == port


def url_of(line: Json) -> str:
    assert line["ready"] is True
    url = str(line["url"])
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9][0-9]*", url)
    return url


def start(lab: Lab, what: str, model: Model) -> Running:
    if what == "serve":
        return lab.start("serve", "--port", 0, "--json", fresh=True)
    common = (*lab.common(), "--instance-id", "it")
    if what == "source":
        return lab.start("source", model.folder, *common, fresh=True)
    return lab.start("pull", "--serve", "--checkpoint", model.folder, *common, fresh=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("what", ["serve", "source", "pull --serve"])
def test_long_running_command_says_ready_serves_and_ends_with_0(
    served: Lab, small: Model, what: str, number: signal.Signals
) -> None:
    running = start(served, what, small)
    line = running.line()
    url = url_of(line)
    if what == "serve":
        assert line == {"ready": True, "url": url}
    else:
        assert line["instance_id"] == "it"
        assert line["ranks"] == [{"rank": 0, "url": url}]
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert httpx.get(f"{url}/readyz").status_code == 200
    running.send_signal(number)
    outcome = running.finish()
    assert (outcome.code, outcome.lines) == (0, []), outcome.log
    assert "Traceback" not in outcome.log
    with ServiceClient(served.service) as client:
        assert "it" not in {instance["instance_id"] for instance in client.instances()}


def test_ready_line_tells_the_advertised_url(served: Lab, proxy: Proxy, small: Model) -> None:
    line = served.source(small.folder, *proxy.flags).line()
    assert (line["url"], line["ranks"]) == (proxy.url, [{"rank": 0, "url": proxy.url}])


def test_source_that_is_stopped_finishes_the_reads_that_it_has_begun(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path
) -> None:
    source = served.ready_source(model.folder, *proxy.flags)
    proxy.hold_after(20 * MIB)
    target = served.pull("--checkpoint", model.folder, "--save", tmp_path / "out")
    proxy.wait_until_held()
    source.send_signal(signal.SIGTERM)
    proxy.release()
    answer = target.finish().check(0)
    assert cast(int, answer["bytes_peer"]) + cast(int, answer["bytes_disk"]) == model.nbytes
    check_saved(tmp_path / "out", model.tensors)
    assert source.wait() == 0


def test_service_that_is_stopped_ends_its_streams_of_events(
    served: Lab, lab: Lab, proxy: Proxy, model: Model, reserve: Callable[[], int]
) -> None:
    service = lab.serve()
    served.ready_source(model.folder, *proxy.flags)
    proxy.hold_after(20 * MIB)
    target = served.pull()
    proxy.wait_until_held()
    with ServiceClient(served.service) as client:
        (transfer,) = client.transfers()
    url = f"{served.service}/v1/transfers/{transfer['transfer_id']}/events"
    with httpx.stream("GET", url) as response:
        lines = response.iter_lines()
        assert next(lines)
        assert service.stop() == 0
        # It ends, as a stream does, and not with a broken connection.
        assert all("Traceback" not in line for line in lines)
    proxy.release()
    target.kill()


def test_version_is_told(lab: Lab) -> None:
    outcome = lab.run("--version", fresh=True)
    assert outcome.code == 0
    assert re.fullmatch(r"weightwire \d+\.\d+\.\d+.*", outcome.lines[0])
