"""What networks, gateways and caches do to answers: noticed, and nothing wrong is ever kept."""

from __future__ import annotations

import http.client
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest

from tests.faults.checkpoints import MIB, check_saved
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab
from tests.faults.proxy import Fault, Proxy, Replayed, answered, cut, flipped, shortened, without_range
from weightwire.service.client import PullRequest, ServiceClient, pull
from weightwire.transfer import Checkpoint, PullOptions, Timeouts
from weightwire.transfer.wire.framing import PROTOCOL

PAGE = b"<html><title>Sign in</title>You are not signed in.</html>"
HTML = ("Content-Type", "text/html; charset=utf-8")
# Bytes of a frame's header, and of its trailer. Source: docs/protocol.md.
HEADER_BYTES = 8
CHUNK_BYTES = MIB


def the_failure(answer: Json) -> dict[str, str]:
    (failure,) = cast("list[dict[str, str]]", answer["failures"])
    return failure


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(2, id="in a frame's kind"),
        pytest.param(7, id="in a frame's length"),
        pytest.param(HEADER_BYTES + 5000, id="in the payload"),
        pytest.param(5 * MIB, id="in a later frame"),
    ],
)
def test_pull_fetches_again_what_one_flipped_bit_spoiled(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path, at: int
) -> None:
    served.ready_source(model.folder, *proxy.flags)
    proxy.faults = [flipped(at)]
    answer = served.pull("--save", tmp_path / "out").finish().check(0)
    assert (answer["state"], answer["verified"], answer["failures"]) == ("ready", True, [])
    assert (answer["bytes_peer"], answer["bytes_disk"]) == (model.nbytes, 0)
    assert proxy.passed_bytes > model.nbytes
    check_saved(tmp_path / "out", model.tensors)


def test_pull_quarantines_a_source_whose_bits_keep_flipping(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path
) -> None:
    served.ready_source(model.folder, *proxy.flags)
    proxy.always = flipped(HEADER_BYTES + 5000)
    answer = served.pull("--checkpoint", model.folder, "--save", tmp_path / "out").finish().check(0)
    from_peer, from_disk = cast("int", answer["bytes_peer"]), cast("int", answer["bytes_disk"])
    # What was right is kept; the chunk that is wrong whenever it is asked for comes from disk.
    assert from_disk >= CHUNK_BYTES
    assert from_peer + from_disk == model.nbytes
    assert the_failure(answer)["code"] == "checksum_mismatch"
    check_saved(tmp_path / "out", model.tensors)


def test_pull_leaves_a_source_whose_bits_keep_flipping_for_a_sound_one(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path
) -> None:
    served.ready_source(model.folder, *proxy.flags, "--instance-id", "a-faulty")
    served.ready_source(model.folder, "--instance-id", "b-sound")
    proxy.always = flipped(HEADER_BYTES + 5000)
    answer = served.pull("--save", tmp_path / "out").finish().check(0)
    sources = cast("list[dict[str, object]]", answer["sources"])
    given = {source["instance_id"]: cast("int", source["bytes"]) for source in sources}
    assert sum(given.values()) == model.nbytes
    assert given["b-sound"] >= CHUNK_BYTES
    failures = cast("list[dict[str, str]]", answer["failures"])
    assert {failure["code"] for failure in failures} <= {"checksum_mismatch"}
    check_saved(tmp_path / "out", model.tensors)


def test_pull_without_disk_fails_when_the_bits_keep_flipping(
    served: Lab, proxy: Proxy, small: Model, tmp_path: Path
) -> None:
    served.ready_source(small.folder, *proxy.flags)
    proxy.always = flipped(HEADER_BYTES + 5000)
    outcome = served.pull("--save", tmp_path / "out").finish()
    assert outcome.check(1)["state"] == "failed"
    assert outcome.error["code"] == "coverage_incomplete"
    assert "checksum_mismatch" in str(outcome.error["detail"])
    assert not (tmp_path / "out").exists()


ENDS_EARLY = [
    pytest.param(cut(3 * MIB // 2), id="the connection closes in the middle of a frame"),
    pytest.param(cut(3 * MIB // 2, reset=True), id="the connection is reset"),
    pytest.param(cut(0), id="the connection closes before the first byte"),
    pytest.param(shortened(3 * MIB // 2), id="a Content-Length of fewer bytes"),
    pytest.param(shortened(CHUNK_BYTES + 20), id="a Content-Length of one whole frame"),
    pytest.param(shortened(3 * MIB // 2, chunked=True), id="a last chunk comes early"),
    pytest.param(shortened(0), id="200 with nothing"),
]


@pytest.mark.parametrize("fault", ENDS_EARLY)
def test_pull_b42_asks_again_after_a_body_that_ended_early(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path, fault: Fault
) -> None:
    served.ready_source(model.folder, *proxy.flags)
    proxy.faults = [fault]
    answer = served.pull("--save", tmp_path / "out").finish().check(0)
    assert (answer["state"], answer["bytes_peer"], answer["failures"]) == ("ready", model.nbytes, [])
    check_saved(tmp_path / "out", model.tensors)


@pytest.mark.parametrize("fault", ENDS_EARLY)
def test_pull_b42_turns_to_disk_when_every_body_ends_early(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path, fault: Fault
) -> None:
    served.ready_source(model.folder, *proxy.flags)
    proxy.always = fault
    answer = served.pull("--checkpoint", model.folder, "--save", tmp_path / "out").finish().check(0)
    peer, disk = cast(int, answer["bytes_peer"]), cast(int, answer["bytes_disk"])
    assert (answer["state"], peer + disk) == ("ready", model.nbytes)
    assert disk > 0
    failure = the_failure(answer)
    assert failure["code"] == "source_unreachable"
    check_saved(tmp_path / "out", model.tensors)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        pytest.param(answered("200 OK", PAGE, HTML), "protocol_violation", "text/html", id="a page with 200"),
        pytest.param(answered("403 Forbidden", PAGE, HTML), "source_refused", "403", id="a page with 403"),
        pytest.param(
            answered("302 Found", b"", HTML, ("Location", "/login")), "source_refused", "302", id="a login page"
        ),
        pytest.param(answered("404 Not Found", b"{}", ("Content-Type", "application/json")), "source_refused", "404",
                     id="somebody else's JSON"),
    ],
)  # fmt: skip
def test_pull_b44_takes_no_page_for_tensor_bytes(
    served: Lab, proxy: Proxy, small: Model, tmp_path: Path, fault: Fault, code: str, said: str
) -> None:
    served.ready_source(small.folder, *proxy.flags)
    proxy.always = fault
    outcome = served.pull("--checkpoint", small.folder, "--save", tmp_path / "out", "--log-level", "debug").finish()
    answer = outcome.check(0)
    assert (answer["bytes_peer"], answer["bytes_disk"]) == (0, small.nbytes)
    failure = the_failure(answer)
    assert failure["code"] == code
    assert said in failure["detail"]
    assert proxy.url in failure["detail"]
    # Nobody follows a redirect, quotes a page or prints a credential.
    assert {request.target for request in proxy.requests} == {"/v1/read"}
    tickets = {value.split()[-1] for read in proxy.reads for name, value in read.headers if name == "Authorization"}
    assert tickets
    for secret in (*tickets, "Sign in"):
        assert secret not in outcome.log + "".join(outcome.lines)
    check_saved(tmp_path / "out", small.tensors)


def test_pull_takes_nothing_from_an_answer_to_another_request(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path
) -> None:
    served.ready_source(model.folder, *proxy.flags)
    proxy.always = Replayed()
    answer = served.pull("--checkpoint", model.folder, "--save", tmp_path / "out").finish().check(0)
    assert cast(int, answer["bytes_peer"]) + cast(int, answer["bytes_disk"]) == model.nbytes
    failure = the_failure(answer)
    assert failure["code"] == "protocol_violation"
    assert "Weightwire-Request" in failure["detail"]
    check_saved(tmp_path / "out", model.tensors)


def test_pull_comes_back_to_a_source_that_is_busy(served: Lab, proxy: Proxy, small: Model) -> None:
    served.ready_source(small.folder, *proxy.flags)
    proxy.faults = [answered("503 Service Unavailable", PAGE, HTML, ("Retry-After", "0"))] * 2
    answer = served.pull().finish().check(0)
    assert (answer["bytes_peer"], answer["failures"]) == (small.nbytes, [])


def test_source_serves_as_many_readers_as_it_may_and_the_others_after_them(
    served: Lab, proxy: Proxy, small: Model
) -> None:
    served.ready_source(small.folder, *proxy.flags, "--max-readers", 1)
    proxy.hold_after(0)
    targets = [served.pull("--streams", 2) for _ in range(3)]
    proxy.wait_for_reads(from_targets=3)
    proxy.release()
    for target in targets:
        answer = target.finish().check(0)
        assert (answer["bytes_peer"], answer["failures"]) == (small.nbytes, [])


def test_pull_works_through_a_proxy_that_drops_ranges(served: Lab, proxy: Proxy, small: Model) -> None:
    """The puller's ranges are in a body, which nobody on the way takes for a hint."""
    served.ready_source(small.folder, *proxy.flags)
    proxy.always = proxy.other = without_range
    answer = served.pull().finish().check(0)
    assert (answer["bytes_peer"], answer["failures"]) == (small.nbytes, [])


def ranged(url: str, name: str, first: int, last: int) -> tuple[int, str | None, bytes]:
    """Status, Content-Range and body of a ranged GET."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", f"/v1/tensors/{name}", headers={"Range": f"bytes={first}-{last}"})
    response = connection.getresponse()
    found = response.status, response.getheader("Content-Range"), response.read()
    connection.close()
    return found


def test_source_says_in_its_status_whether_a_range_was_heard(served: Lab, proxy: Proxy, small: Model) -> None:
    source = served.source(small.folder, *proxy.flags)
    url = str(source.line()["url"])
    name = "layers.0.mlp.weight"
    data = small.tensors[name].data
    assert ranged(url, name, 1000, 1999) == (206, f"bytes 1000-1999/{len(data)}", data[1000:2000])
    proxy.other = without_range
    assert ranged(url, name, 1000, 1999) == (200, None, data)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGSTOP, id="stopped"), pytest.param(0, id="cut off")])
def test_pull_gives_up_a_source_from_which_nothing_comes(served: Lab, proxy: Proxy, model: Model, number: int) -> None:
    """A stopped process still acknowledges what TCP delivers, and so does a network that only delays."""
    source = served.ready_source(model.folder, *proxy.flags)
    proxy.hold_after(20 * MIB)
    options = PullOptions(timeouts=Timeouts(stall_s=1.0))
    with (
        Checkpoint.open(model.folder) as checkpoint,
        ServiceClient(served.service) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        request = PullRequest(model=served.model, checkpoint=checkpoint, options=options)
        pulling = pool.submit(pull, client, request)
        proxy.wait_until_held()
        if number:
            source.send_signal(number)
            proxy.release()
        pulled = pulling.result()
        assert checkpoint.bytes_read == pulled.result.bytes_disk > 0
    (failure,) = pulled.result.failures
    assert failure.code == "source_stalled"
    assert pulled.result.bytes_peer + pulled.result.bytes_disk == model.nbytes
    manifest = pulled.shells.manifest
    for name, expected in model.tensors.items():
        assert b"".join(pulled.shells.gather(manifest.flat_region(manifest.by_name[name]))) == expected.data


def test_pull_b45_asks_no_proxy_of_the_environment(served: Lab, small: Model) -> None:
    nowhere = dict.fromkeys(
        ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9"
    )
    environment = nowhere | {"NO_PROXY": "", "no_proxy": ""}
    source = served.source(small.folder, env=environment)
    assert source.line()["ready"] is True
    answer = served.pull(env=environment).finish().check(0)
    assert (answer["bytes_peer"], answer["failures"]) == (small.nbytes, [])


def test_source_answers_a_request_that_it_does_not_know_with_a_problem(served: Lab, small: Model) -> None:
    url = str(served.source(small.folder).line()["url"])
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", "/nothing")
    response = connection.getresponse()
    problem = json.loads(response.read())
    connection.close()
    assert (response.status, response.getheader("Content-Type")) == (404, "application/problem+json")
    assert problem["code"] == "not_found"
    assert response.getheader("Weightwire-Protocol") == PROTOCOL
