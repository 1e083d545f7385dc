"""Several sources at once: what one loses another gives, nothing comes twice, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.transfer.conftest import PATIENCE_S, SHORT, MakeFake, Serve, bits, endpoint_of, filled, read_request
from tests.transfer.wire.conftest import Answer, Answering, Closed, Held, Model, Spoil, answer_to, fail
from tests.transfer.wire.pulling import CHUNK, Pull, asked, cut, endpoint, flip, good, model_of, planned
from weightwire.transfer.errors import CancelledError, DeadlineError, TransferError
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import Topology
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.framing import ReadRequest
from weightwire.transfer.wire.puller import Puller
from weightwire.transfer.wire.source import SourceLimits


@pytest.fixture
def long() -> Model:
    """Forty chunks."""
    return model_of({"a": filled("uint8", (40 * CHUNK - 5,)), "b": filled("float32", (1,), seed=1)})


# Several sources


def test_two_sources_of_one_manifest_share_the_work(serve: Serve, long: Model) -> None:
    endpoints = [serve(long.shells, instance_id=name).endpoint() for name in ("x", "y")]
    pull = Pull(endpoints, [long]).run()
    assert pull.is_complete
    assert pull.codes == {}
    assert sum(pull.told) == long.manifest.total_bytes
    assert list(pull.puller.coverage.proven[long.manifest.digest]) == [(0, long.manifest.total_bytes)]
    pull.check(long)


def test_sources_of_different_manifests_give_what_each_has(serve: Serve) -> None:
    tensors = {"a": filled("uint8", (100,)), "b": filled("int16", (50,), seed=1).view(5, 10), "c": filled("int8", (9,))}
    whole = model_of(tensors)
    first, second = model_of({"a": tensors["a"]}), model_of({"b": tensors["b"].T.contiguous().T, "c": tensors["c"]})
    endpoints = [serve(first.shells, instance_id="x").endpoint(), serve(second.shells, instance_id="y").endpoint()]
    pull = Pull(endpoints, [first, second], target=Shells.allocate(whole.manifest)).run()
    assert pull.given == {"x": 100, "y": 109}
    assert pull.is_complete
    pull.check(whole)


def test_source_that_dies_loses_the_rest_to_the_other_and_nothing_comes_twice(
    serve: Serve, answering: Answering, long: Model
) -> None:
    dying = answering(cut(3), lambda _: Closed(b""), of=long)
    other = serve(long.shells, instance_id="y", limits=SourceLimits(max_readers=1))
    pull = Pull([endpoint(long, dying, "x")], [long], streams=1)
    with pull.puller as puller:
        puller.pull(planned(pull.target, puller), pull.control)
    assert pull.codes == {"x": "source_unreachable"}
    assert pull.puller.coverage.target.total == 3 * CHUNK
    again = Puller(pull.target, [other.endpoint()], pull.manifests)
    with again as puller:
        left = planned(pull.target, puller, pull.puller.coverage.target)
        assert left.source_bytes(0) == long.manifest.total_bytes - 3 * CHUNK
        puller.pull(left, pull.control)
    assert bits(pull.target.tensor("a")) == bits(long.shells.tensor("a"))


def test_dying_and_living_source_at_the_same_time(serve: Serve, answering: Answering, long: Model) -> None:
    dying = answering(cut(2), lambda _: Closed(b""), of=long)
    living = serve(long.shells, instance_id="y")
    pull = Pull([endpoint(long, dying, "x"), living.endpoint()], [long]).run()
    assert pull.is_complete
    pull.check(long)
    assert set(pull.codes) <= {"x"}


def test_sources_that_are_not_there_are_named_each_with_its_reason(long: Model) -> None:
    gone = []
    for name in ("x", "y"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        gone.append(endpoint_of(long.manifest, url=url, instance_id=name))
    pull = Pull(gone, [long]).run()
    assert pull.codes == {"x": "source_unreachable", "y": "source_unreachable"}
    assert (list(pull.puller.lost), pull.puller.capacities) == ([0], [0])
    assert pull.puller.manifests == [long.manifest]
    assert all("refused" in failure.detail for failure in pull.puller.failures)


def test_source_without_digests_is_not_believed(serve: Serve, long: Model) -> None:
    bare = Shells.allocate(long.manifest).manifest
    pull = Pull(
        [endpoint_of(bare, url=serve(long.shells).server.url)], [Model(shells=long.shells, manifest=bare)]
    ).run()  # fmt: skip
    assert pull.codes == {"s": "manifest_invalid"}
    assert pull.puller.coverage.target.total == 0


def test_source_that_a_plan_does_not_need_is_not_connected_to(fake: MakeFake, serve: Serve, long: Model) -> None:
    other = model_of({"c": filled("uint8", (9,))})
    idle = fake(lambda _: None)
    endpoints = [serve(long.shells).endpoint(), endpoint(other, idle, "idle")]
    pull = Pull(endpoints, [long, other]).run()
    assert pull.is_complete
    assert pull.codes == {}
    assert idle.connections == 0


def test_manifest_is_lost_when_the_last_of_its_sources_is(serve: Serve, answering: Answering, long: Model) -> None:
    other = model_of({"c": filled("uint8", (9,))})
    dying = answering(lambda _: Closed(b""), of=long)
    endpoints = [
        endpoint(long, dying, "x"),
        serve(long.shells, instance_id="y").endpoint(),
        endpoint(long, dying, "z"),
        serve(other.shells, instance_id="w").endpoint(),
    ]
    pull = Pull(endpoints, [long, other])
    assert (pull.puller.manifests, pull.puller.capacities) == ([long.manifest, other.manifest], [3, 1])
    assert not pull.puller.lost
    pull.run()
    assert pull.is_complete
    # It keeps its number whoever is gone: what was fetched is found again by it.
    assert pull.puller.manifests == [long.manifest, other.manifest]
    assert pull.puller.capacities == [3 - len(pull.codes), 1]
    assert not pull.puller.lost
    pull = Pull(endpoints[:1], [long]).run()
    assert (list(pull.puller.lost), pull.puller.capacities) == ([0], [0])


# One source that has its moods


def test_connection_that_breaks_is_opened_again_and_goes_on_where_it_was(answering: Answering, long: Model) -> None:
    server = answering(cut(5), cut(1), cut(7), good, of=long)
    pull = Pull([endpoint(long, server)], [long], streams=1).run()
    assert pull.is_complete
    assert pull.codes == {}
    assert server.connections == 4
    begins = [regions[0][0] for regions in asked(server)][:4]
    assert begins == [0, 5 * CHUNK, 6 * CHUNK, 13 * CHUNK]
    assert sum(pull.told) == long.manifest.total_bytes
    pull.check(long)


def test_connection_that_breaks_again_and_again_is_given_up(answering: Answering, long: Model) -> None:
    pull = Pull([endpoint(long, answering(cut(1), of=long))], [long], streams=1).run()
    assert pull.codes == {"s": "source_unreachable"}
    assert pull.puller.coverage.target.total == 6 * CHUNK
    pull.check(long)


def test_source_that_never_gets_anywhere_is_given_up_after_the_second_try(answering: Answering, long: Model) -> None:
    server = answering(cut(0), of=long)
    pull = Pull([endpoint(long, server)], [long], streams=1).run()
    assert pull.codes == {"s": "source_unreachable"}
    assert server.connections == 2


def test_flipped_bit_is_fetched_again(answering: Answering, long: Model) -> None:
    pull = Pull([endpoint(long, answering(flip, good, of=long))], [long], streams=1).run()
    assert pull.is_complete
    assert pull.codes == {}
    pull.check(long)


def test_source_whose_checksums_are_wrong_twice_is_believed_no_more(
    serve: Serve, answering: Answering, long: Model
) -> None:
    liar = answering(flip, of=long)
    pull = Pull([endpoint(long, liar, "x")], [long], streams=1).run()
    assert pull.codes == {"x": "checksum_mismatch"}
    # What was right stays: only the first chunk of each answer is wrong.
    assert list(pull.puller.coverage.target) == [(CHUNK, long.manifest.total_bytes)]
    assert [len(regions) for regions in asked(liar)] == [1, 1]
    assert asked(liar)[1] == [(0, CHUNK)]
    pull = Pull([endpoint(long, liar, "x"), serve(long.shells, instance_id="y").endpoint()], [long]).run()
    assert pull.is_complete
    pull.check(long)


def test_source_that_launders_other_bytes_is_found_out(answering: Answering, long: Model) -> None:
    """A relay with bad memory hashes what it sends; the manifest knows better."""

    def launder(answer: Answer) -> bytes:
        other = Answer(headers=answer.headers, payloads=[bytes(len(payload)) for payload in answer.payloads])
        return other.text()

    pull = Pull([endpoint(long, answering(launder, of=long))], [long]).run()
    assert pull.codes == {"s": "checksum_mismatch"}
    assert "the manifest says" in pull.puller.failures[0].detail


def refusal(status: str, document: bytes) -> Spoil:
    return lambda answer: answer.text(document, status=status, content_type="application/problem+json")


def test_busy_source_is_asked_again(answering: Answering, long: Model) -> None:
    busy = refusal("503 Busy", b'{"code": "source_busy", "detail": "full", "retry_after_s": 0}')
    server = answering(busy, busy, cut(3), busy, good, of=long)
    pull = Pull([endpoint(long, server)], [long], streams=1).run()
    assert pull.is_complete
    assert pull.codes == {}
    pull.check(long)


@pytest.mark.parametrize("seconds", ["1", "31.5", "1e300", "9" * 400, "Infinity"])
def test_source_that_stays_busy_is_given_up_when_patience_is_over(
    answering: Answering, long: Model, seconds: str
) -> None:
    document = f'{{"code": "source_busy", "detail": "full", "retry_after_s": {seconds}}}'.encode()
    pull = Pull([endpoint(long, answering(refusal("503 B", document), of=long))], [long], busy_patience_s=0.5).run()
    assert pull.codes == {"s": "source_busy"}


def test_patience_with_a_busy_source_begins_anew_with_every_byte(answering: Answering, long: Model) -> None:
    busy = refusal("503 Busy", b'{"code": "source_busy", "detail": "full", "retry_after_s": 0.05}')
    server = answering(busy, cut(1), busy, cut(1), busy, cut(1), busy, good, of=long)
    pull = Pull([endpoint(long, server)], [long], streams=1, busy_patience_s=0.06).run()
    assert pull.codes == {}
    assert pull.is_complete


REFUSALS = {
    "ticket_invalid": refusal("403 Forbidden", b'{"code": "ticket_invalid", "detail": "expired"}'),
    "source_fenced": refusal("409 Conflict", b'{"code": "source_fenced", "detail": "generation is 8 here"}'),
    "source_refused": lambda answer: answer.text(b"<html>", status="500 Error", content_type="text/html"),
    "transfer_failed": refusal("500 Error", b'{"code": "something_new", "detail": "x"}'),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_source_that_refuses_is_given_up_at_once(answering: Answering, long: Model, code: str) -> None:
    server = answering(REFUSALS[code], of=long)
    pull = Pull([endpoint(long, server)], [long], streams=1).run()
    assert pull.codes == {"s": code}
    assert len(server.requests) == 1


@pytest.mark.parametrize("code", ["cancelled", "deadline_exceeded"])
def test_source_cannot_stop_the_transfer_by_saying_so(
    serve: Serve, answering: Answering, long: Model, code: str
) -> None:
    stopper = answering(lambda answer: Closed(answer.text(fail(f'{{"code": "{code}"}}'.encode()))), of=long)
    pull = Pull([endpoint(long, stopper, "x")], [long]).run()
    assert pull.codes == {"x": "source_refused"}
    pull = Pull([endpoint(long, stopper, "x"), serve(long.shells, instance_id="y").endpoint()], [long]).run()
    assert pull.is_complete


def test_process_that_says_nothing_is_given_up_with_all_its_ranks_at_once(answering: Answering, long: Model) -> None:
    """Or it would be waited for once more for each rank that has the small tensors, too."""
    silent = answering(lambda _: Held(b""), of=long)
    of_two = replace(long.manifest, topology=Topology(tp=2))
    small = tuple(tensor for tensor in of_two.tensors if tensor.name == "b")
    ranks = [replace(long, manifest=of_two), replace(long, manifest=replace(of_two, rank=1, tensors=small))]
    endpoints = [
        endpoint_of(model.manifest, url=silent.url, instance_id="x", rank=rank) for rank, model in enumerate(ranks)
    ]
    pull = Pull(endpoints, ranks, target=Shells.allocate(long.manifest), timeouts=SHORT).run()
    assert [(failure.rank, failure.code) for failure in pull.puller.failures] == [
        (0, "source_stalled"),
        (1, "source_stalled"),
    ]
    assert {ReadRequest.from_bytes(body).manifest for body in silent.requests} == {ranks[0].manifest.digest}


def test_stalled_source_loses_its_work_to_the_other(serve: Serve, answering: Answering, long: Model) -> None:
    silent = answering(lambda answer: Held(answer.text()[:-100]), of=long)
    living = serve(long.shells, instance_id="y")
    pull = Pull([endpoint(long, silent, "x"), living.endpoint()], [long], timeouts=SHORT).run()
    assert pull.is_complete
    assert set(pull.codes.items()) <= {("x", "source_stalled")}
    pull.check(long)
    pull = Pull([endpoint(long, silent, "x")], [long], timeouts=SHORT).run()
    assert pull.codes == {"x": "source_stalled"}


def test_strided_target_is_counted_once_although_its_source_died(serve: Serve, answering: Answering) -> None:
    held = model_of({"a": filled("int16", (10, 10)), "b": filled("uint8", (40,))})
    wanted = {"a": filled("int16", (10, 12))[:, 1:11], "b": filled("uint8", (40,))}
    dying = answering(cut(4), lambda _: Closed(b""), of=held)
    living = serve(held.shells, instance_id="y")
    target = Shells.from_tensors(wanted)
    pull = Pull([endpoint(held, dying, "x")], [held], target=target, streams=1)
    with pull.puller as puller:
        puller.pull(planned(target, puller), pull.control)
        # Of a strided tensor, too, nothing is lost that was verified.
        assert puller.coverage.target.total == puller.coverage.bytes_by_source.total() == 4 * CHUNK
    pull = Pull([endpoint(held, dying, "x"), living.endpoint()], [held], target=target).run()
    assert sum(pull.given.values()) == 240
    assert {name: bits(t) for name, t in target.tensors()} == {name: bits(t) for name, t in held.shells.tensors()}


def test_strided_target_that_one_source_began_is_finished_whole_by_the_next(serve: Serve, answering: Answering) -> None:
    """Within one pull: the second source has another manifest, and so a plan of its own."""
    tensors = {"a": filled("int16", (10, 10)), "b": filled("uint8", (40,))}
    first, second = model_of(tensors), model_of(tensors | {"c": filled("uint8", (3,), seed=1)})
    target = Shells.from_tensors({"a": filled("int16", (10, 12))[:, 1:11], "b": filled("uint8", (40,))})
    dying = answering(cut(4), lambda _: Closed(b""), of=first)
    endpoints = [endpoint(first, dying, "x"), serve(second.shells, instance_id="y").endpoint()]
    pull = Pull(endpoints, [first, second], target=target, streams=1).run()
    assert pull.codes == {"x": "source_unreachable"}
    assert sum(pull.given.values()) == pull.puller.coverage.target.total == 240
    assert {name: bits(t) for name, t in target.tensors()} == {name: bits(t) for name, t in tensors.items()}


def test_progress_is_told_in_steps_that_add_up(serve: Serve) -> None:
    large = model_of({"a": torch.ones(20 << 20, dtype=torch.uint8)}, chunk_bytes=1 << 20)
    pull = Pull([serve(large.shells).endpoint()], [large]).run()
    assert sum(pull.told) == 20 << 20
    assert len(pull.told) > 2
    assert all(pull.told)
    assert pull.target.seal() == large.manifest


# Stopping


def stopped(pull: Pull) -> threading.Thread:
    """The pull, in a thread, until it raises."""

    def run() -> None:
        with pytest.raises(CancelledError, match="because"):
            pull.run()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


ENDLESS: dict[str, Spoil] = {
    "no head": lambda _: Held(b""),
    "half a body": lambda answer: Held(answer.text()[:-200]),
    "half a body on a connection that closes": lambda answer: Held(answer.text(connection="close")[:-200]),
    "busy": refusal("503 Busy", b'{"code": "source_busy", "detail": "full", "retry_after_s": 20}'),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_cancel_ends_every_stream_and_closes_every_socket(fake: MakeFake, long: Model, kind: str) -> None:
    reached, closed = threading.Event(), threading.Semaphore(0)

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            if body := read_request(connection)[1]:
                connection.sendall(ENDLESS[kind](answer_to(body, long.shells)))
                reached.set()
                while connection.recv(1 << 16):
                    pass
        closed.release()

    server = fake(answer)
    pull = Pull([endpoint(long, server)], [long])
    thread = stopped(pull)
    reached.wait(PATIENCE_S)
    pull.control.cancel("because")
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    for _ in range(2):
        assert closed.acquire(timeout=PATIENCE_S)
    pull.check(long)


def test_cancel_comes_before_the_first_byte(serve: Serve, long: Model) -> None:
    pull = Pull([serve(long.shells).endpoint()], [long])
    pull.control.cancel("because")
    with pytest.raises(CancelledError, match="because"):
        pull.run()
    assert pull.puller.coverage.target.total == 0


def test_cancel_from_the_report_of_progress(serve: Serve, long: Model) -> None:
    pull = Pull([serve(long.shells).endpoint()], [long])
    with pytest.raises(CancelledError, match="because"):
        pull.run(lambda _: pull.control.cancel("because"))
    pull.check(long)


def test_deadline_ends_a_pull_that_still_gets_bytes(fake: MakeFake) -> None:
    """It never stalls, and its frame would take a minute."""
    slow = model_of({"a": filled("uint8", (10_000,))}, chunk_bytes=10_000)

    def dribble(connection: socket.socket) -> None:
        if body := read_request(connection)[1]:
            connection.sendall(answer_to(body, slow.shells).text(connection="close")[:-9000])
            while not server.over.wait(0.01):
                connection.sendall(b"x")

    server = fake(dribble)
    pull = Pull([endpoint(slow, server)], [slow], deadline_s=0.3)
    with pytest.raises(DeadlineError):
        pull.run()
    assert pull.puller.coverage.target.total == 0


def test_report_that_raises_ends_the_pull_and_leaves_nobody_waiting(serve: Serve, long: Model) -> None:
    """The failure is the caller's own; it must not become a wait until the deadline."""

    def report(_: int) -> None:
        raise TransferError("out of ideas")

    pull = Pull([serve(long.shells).endpoint()], [long]).run(report)
    assert [failure.detail for failure in pull.puller.failures] == ["out of ideas"]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_socket_is_left_open(serve: Serve, answering: Answering, long: Model) -> None:
    served = serve(long.shells, instance_id="y")
    server = answering(cut(1), of=long)
    Pull([served.endpoint()], [long]).run()
    served.source.withdraw(drain_s=PATIENCE_S)
    served.source.publish(long.shells, weight_version=3)
    before = open_files()
    endpoints = [served.endpoint(instance_id="z"), endpoint(long, server)]
    pulls = [Pull(endpoints, [long], timeouts=SHORT).run() for _ in range(5)]
    served.server.stop()
    server.close()
    assert open_files() <= before
    assert len(pulls) == 5


# Proxies


@pytest.mark.parametrize("no_proxy", ["", "127.0.0.0/8", "*"])
def test_b45_proxy_of_the_environment_is_not_asked(
    serve: Serve, long: Model, monkeypatch: pytest.MonkeyPatch, no_proxy: str
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert Pull([serve(long.shells).endpoint()], [long]).run().is_complete


# Anything may happen


class Chaos:
    """A source that answers in some wrong way now and then, by chance."""

    def __init__(self, seed: int, *, badness: float) -> None:
        self._chance = random.Random(seed)
        self._badness = badness

    def __call__(self, answer: Answer) -> bytes:
        chance = self._chance
        if chance.random() > self._badness:
            return answer.text()
        body = bytearray(answer.body)
        body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
        half = answer.body[: chance.randrange(len(answer.body))]
        return chance.choice(
            [
                Closed(b""),
                Closed(answer.text(half, content_length=str(len(answer.body)))),
                Closed(answer.text(half)),
                Closed(answer.text(bytes(body))),
                Closed(answer.text(half, content_length=None, connection="close")),
                Closed(answer.text(half + fail(b'{"code": "source_failed"}'))),
                refusal("503 Busy", b'{"code": "source_busy", "retry_after_s": 0}')(answer),
                answer.text(answer.body + b"more"),
            ]
        )


@pytest.fixture
def strided() -> Model:
    """Tensors of every kind, so that some are gathered, some scattered, and some share frames."""
    return model_of(
        {
            "plain": filled("uint8", (300,)),
            "transposed": filled("int16", (10, 12), seed=1).T,
            "column": filled("float32", (9, 4), seed=2)[:, 1],
            "scalar": filled("float32", (), seed=3),
            "small": filled("uint8", (3,), seed=4),
        }
    )


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_what_is_covered_is_right_and_counted_once(
    serve: Serve, answering: Answering, strided: Model, seed: int
) -> None:
    tensors = dict(strided.shells.tensors())
    target = Shells.from_tensors(
        {
            name: torch.empty_like(t) if seed % 2 else torch.empty((*t.shape, 2), dtype=t.dtype)[..., 1]
            for name, t in tensors.items()
        }
    )
    servers = [answering(Chaos(seed, badness=0.5), of=strided), answering(Chaos(-seed - 1, badness=0.9), of=strided)]
    endpoints = [endpoint(strided, server, f"chaos-{number}") for number, server in enumerate(servers)]
    if seed % 3 == 0:
        endpoints.append(serve(strided.shells, instance_id="good").endpoint())
    pull = Pull(endpoints, [strided], target=target).run()
    covered = pull.puller.coverage.target
    assert sum(pull.given.values()) == covered.total
    if seed % 3 == 0:
        assert pull.is_complete or seed % 2 == 0
    for name, tensor in target.tensors():
        region = target.manifest.flat_region(target.manifest.by_name[name])
        spans = [(start, start + length) for start, length in region.runs()]
        if all(covered.covers(begin, end) for begin, end in spans):
            assert bits(tensor) == bits(tensors[name])
        elif region.is_contiguous:
            found, wanted = bits(tensor), bits(tensors[name])
            for begin, end in IntervalSet(covered):
                low, high = max(begin, region.offset) - region.offset, min(end, region.end) - region.offset
                assert found[max(low, 0) : max(high, 0)] == wanted[max(low, 0) : max(high, 0)]
        if seed % 3 == 0:
            assert all(covered.covers(begin, end) for begin, end in spans)
    assert all(left[1] < right[0] for left, right in pairwise(covered))
