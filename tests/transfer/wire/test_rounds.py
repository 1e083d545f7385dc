"""Who takes part in a round, who is dropped from it because nothing comes, and when it ends to be planned again."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.transfer.conftest import PATIENCE_S, Fake, MakeFake, Serve, bits, endpoint_of, filled, read_request
from tests.transfer.wire.conftest import Answer, Answering, Closed, Held, Model, Spoil, answer_to, data
from tests.transfer.wire.pulling import LONG, Pull, asked, endpoint, good, model_of, paced, planned
from weightwire.transfer.control import Control
from weightwire.transfer.errors import SourceUnreachableError
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.framing import ReadRequest
from weightwire.transfer.wire.lanes import Lane, Work
from weightwire.transfer.wire.ledger import Ledger
from weightwire.transfer.wire.puller import Puller, PullOptions
from weightwire.transfer.wire.stream import Timeouts

KIB = 1 << 10
# Short enough to be waited for, long enough for threads on a busy machine.
WINDOW_S = 0.6
BRISK = PullOptions(timeouts=LONG, stall_window_s=WINDOW_S)


@pytest.fixture
def large() -> Model:
    """Four hundred chunks."""
    return model_of({"a": filled("uint8", (400 * 4 * KIB,))}, chunk_bytes=4 * KIB)


def check_all(pull: Pull, model: Model) -> None:
    assert pull.is_complete
    assert bits(pull.target.tensor("a")) == bits(model.shells.tensor("a"))
    pull.check(model)


# Sources that are asked, and from which nothing comes


def silent(_: Answer) -> bytes:
    return Held(b"")


def half(answer: Answer) -> bytes:
    return Held(answer.text()[: len(answer.text()) // 2])


def dribbling(make: MakeFake, model: Model) -> Fake:
    """A server that sends a byte now and then."""

    def dribble(connection: socket.socket) -> None:
        if body := read_request(connection)[1]:
            raw = answer_to(body, model.shells).text()
            at = 0
            while at < len(raw) and not server.over.wait(0.02):
                connection.sendall(raw[at : at + 1])
                at += 1

    server = make(dribble)
    return server


@contextmanager
def blackhole() -> Iterator[str]:
    """An address that swallows packets: the queue of its listener is full, so the kernel drops who comes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for each in waiting:
            each.close()


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(silent, id="a disk that hangs: the request is never answered"),
        pytest.param(half, id="a process that was stopped, or a connection that is open at one end"),
    ],
)
def test_source_from_which_nothing_comes_is_dropped_and_the_other_one_has_the_rest(
    serve: Serve, answering: Answering, large: Model, spoil: Spoil
) -> None:
    """The time without a byte that a connection may take is far longer here than the test."""
    endpoints = [endpoint(large, answering(spoil, of=large), "x"), serve(large.shells, instance_id="y").endpoint()]
    pull = Pull(endpoints, [large], options=BRISK).run()
    check_all(pull, large)
    assert pull.codes == {"x": "source_stalled"}
    assert pull.failed == ["x"]
    assert "delivered too little" in pull.puller.failures[0].detail


def test_source_that_dribbles_is_dropped(fake: MakeFake, serve: Serve, large: Model) -> None:
    endpoints = [endpoint(large, dribbling(fake, large), "x"), serve(large.shells, instance_id="y").endpoint()]
    pull = Pull(endpoints, [large], options=BRISK).run()
    check_all(pull, large)
    assert pull.codes == {"x": "source_stalled"}


def test_host_that_swallows_all_packets_is_dropped_in_the_same_time(serve: Serve, large: Model) -> None:
    with blackhole() as url:
        endpoints = [
            endpoint_of(large.manifest, url=url, instance_id="x"),
            serve(large.shells, instance_id="y").endpoint(),
        ]
        pull = Pull(endpoints, [large], options=BRISK).run()
    check_all(pull, large)
    assert pull.codes == {"x": "source_unreachable"}
    assert f"no connection within {WINDOW_S:g} s" in pull.puller.failures[0].detail


def test_process_that_was_dropped_is_dropped_with_all_its_ranks(
    serve: Serve, answering: Answering, large: Model
) -> None:
    other = model_of({"a": large.shells.tensor("a"), "b": filled("uint8", (3,))}, chunk_bytes=4 * KIB)
    dead = answering(silent, of=large)
    endpoints = [
        endpoint(large, dead, "x"),
        endpoint_of(other.manifest, url=dead.url, instance_id="x", rank=1),
        serve(large.shells, instance_id="y").endpoint(),
    ]
    pull = Pull(endpoints, [large, other], options=BRISK).run()
    check_all(pull, large)
    assert {(failure.instance_id, failure.rank) for failure in pull.puller.failures} == {("x", 0), ("x", 1)}


def test_only_source_may_be_slow_for_longer_but_not_for_ever(fake: MakeFake, large: Model) -> None:
    alone = PullOptions(timeouts=Timeouts(connect_s=PATIENCE_S, stall_s=1.2), stall_window_s=0.2)
    pull = Pull([endpoint(large, dribbling(fake, large))], [large], options=alone).run()
    assert pull.codes == {"s": "source_stalled"}
    (failure,) = pull.puller.failures
    assert "source 's' rank 0 at http://127.0.0.1:" in failure.detail
    assert float(failure.detail.partition("too little for ")[2].split()[0]) >= 1.2


def test_only_source_is_dropped_at_once_if_a_disk_has_what_it_has(fake: MakeFake, large: Model) -> None:
    pull = Pull([endpoint(large, dribbling(fake, large))], [large], options=BRISK, has_spare=True).run()
    assert pull.codes == {"s": "source_stalled"}


def test_busy_source_is_not_taken_for_a_dead_one(serve: Serve, answering: Answering, large: Model) -> None:
    """It says when to come back, which is longer than a silent one would be waited for."""

    def busy(answer: Answer) -> bytes:
        document = b'{"code": "source_busy", "detail": "full", "retry_after_s": 0.7}'
        return answer.text(document, status="503 B", content_type="application/problem+json")

    options = PullOptions(streams=1, timeouts=LONG, stall_window_s=0.2)
    endpoints = [endpoint(large, answering(busy, good, of=large), "x")]
    pull = Pull(endpoints, [large], options=options, has_spare=True).run()
    check_all(pull, large)
    assert pull.codes == {}


def test_stuck_stream_of_a_source_that_delivers_is_opened_again(fake: MakeFake, large: Model) -> None:
    """A connection may be lost on the way, by a table that forgot it, while its neighbours go on."""
    number = itertools.count()
    stuck = threading.Event()

    def converse(connection: socket.socket) -> None:
        is_first = next(number) == 0
        while body := read_request(connection)[1]:
            if is_first:
                stuck.set()
                server.over.wait(PATIENCE_S)
                return
            stuck.wait(PATIENCE_S)
            raw = answer_to(body, large.shells).text()
            for at in range(0, len(raw), 16 * KIB):
                connection.sendall(raw[at : at + 16 * KIB])
                server.over.wait(0.03)

    server = fake(converse)
    pull = Pull([endpoint(large, server)], [large], options=BRISK).run()
    check_all(pull, large)
    assert pull.codes == {}
    assert server.connections == 3


# Damage


def test_one_bit_in_a_hundred_chunks_costs_hardly_more_than_the_payload(answering: Answering, large: Model) -> None:
    # Each of them the first time that it is asked for.
    unlucky = {large.memory[at * 4 * KIB : (at + 1) * 4 * KIB] for at in range(50, 400, 100)}

    def flip(answer: Answer) -> bytes:
        frames = []
        for payload in answer.payloads:
            frame = bytearray(data(payload))
            if payload in unlucky:
                unlucky.remove(payload)
                frame[len(frame) // 2] ^= 16
            frames.append(bytes(frame))
        return answer.text(b"".join(frames))

    server = answering(flip, of=large)
    pull = Pull([endpoint(large, server)], [large], streams=1).run()
    check_all(pull, large)
    assert pull.codes == {}
    assert server.connections == 1
    assert pull.puller.bytes_received <= 1.02 * large.manifest.total_bytes
    counts = Counter(at for regions in asked(server) for begin, end in regions for at in range(begin, end, 4 * KIB))
    # Nothing but the damaged chunks was asked for twice.
    assert sum(count - 1 for count in counts.values()) == 4
    assert max(counts.values()) == 2


def test_source_that_is_wrong_too_often_is_quarantined_and_keeps_what_was_right(
    serve: Serve, answering: Answering, large: Model
) -> None:
    sent = itertools.count(1)

    def flip(answer: Answer) -> bytes:
        return answer.text(
            b"".join(data(payload, digest=1) if next(sent) % 5 == 0 else data(payload) for payload in answer.payloads)
        )

    liar = answering(flip, of=large)
    pull = Pull([endpoint(large, liar, "x")], [large], streams=1).run()
    assert pull.codes == {"x": "checksum_mismatch"}
    # The fourth of twenty: fewer than twenty frames say nothing.
    assert pull.puller.coverage.target.total == 16 * 4 * KIB
    again = Pull([endpoint(large, liar, "x"), serve(large.shells, instance_id="y").endpoint()], [large]).run()
    check_all(again, large)


# Tiers


def test_standby_source_is_not_asked_while_the_first_one_lives(
    serve: Serve, answering: Answering, large: Model
) -> None:
    standby = answering(good, of=large)
    endpoints = [
        serve(large.shells, instance_id="x").endpoint(),
        endpoint_of(large.manifest, url=standby.url, instance_id="y", standby=1),
    ]
    pull = Pull(endpoints, [large])
    assert pull.puller.capacities == [1]
    check_all(pull.run(), large)
    assert standby.connections == 0
    assert pull.given == {"x": large.manifest.total_bytes}


def test_next_tier_takes_over_in_the_same_pull_once_all_of_the_one_before_are_gone(
    serve: Serve, answering: Answering, large: Model
) -> None:
    def cut(answer: Answer) -> bytes:
        keep = answer.text()[: len(answer.text()) - len(answer.body) + 3 * (4 * KIB + 20) + 12]
        return Closed(keep)

    dying = answering(cut, lambda _: Closed(b""), of=large)
    unused = answering(good, of=large)
    endpoints = [
        endpoint_of(large.manifest, url=dying.url, instance_id="x"),
        endpoint_of(large.manifest, url=unused.url, instance_id="z", standby=2),
        serve(large.shells, instance_id="y").endpoint(standby=1),
    ]
    pull = Pull(endpoints, [large], streams=1)
    with pull.puller as puller:
        plan = planned(pull.target, puller)
        puller.connect(plan)
        puller.pull(plan, pull.control)
    check_all(pull, large)
    assert pull.codes == {"x": "source_unreachable"}
    assert pull.given == {"x": 3 * 4 * KIB, "y": large.manifest.total_bytes - 3 * 4 * KIB}
    assert unused.connections == 0


def test_source_of_a_tier_that_hangs_is_followed_by_the_next_one(
    serve: Serve, answering: Answering, large: Model
) -> None:
    endpoints = [
        endpoint(large, answering(half, of=large), "x"),
        serve(large.shells, instance_id="y").endpoint(standby=1),
    ]
    pull = Pull(endpoints, [large], options=BRISK).run()
    check_all(pull, large)
    assert pull.codes == {"x": "source_stalled"}


def test_relay_is_read_over_one_connection_in_rising_order(answering: Answering, large: Model) -> None:
    relay = answering(good, of=large)
    pull = Pull([endpoint_of(large.manifest, url=relay.url, relay=True)], [large], options=BRISK).run()
    check_all(pull, large)
    assert relay.connections == 1
    regions = [region for request in asked(relay) for region in request]
    assert regions == sorted(regions)
    assert len(relay.requests) > 1


class LateLane(Lane):
    """A lane that is through with its error just after somebody has looked whether it has one."""

    looks = 0
    end: Callable[[], None]

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name == "error" and found is None and self.__class__.looks < 2 and "end" in self.__dict__:
            self.__class__.looks += 1
            if self.__class__.looks == 2:
                self.give_up(SourceUnreachableError("gone"))
                self.end()
        return found

    def threads(self, ledger: Ledger, work: Work, on_end: Callable[[], None]) -> list[threading.Thread]:
        self.end = on_end
        return [threading.Thread(target=lambda: None)]


def test_next_tier_takes_over_from_one_that_ends_while_it_is_looked_at(serve: Serve, large: Model) -> None:
    target = Shells.allocate(large.manifest)
    control = Control(deadline_s=PATIENCE_S)
    lost = endpoint_of(large.manifest, url="http://127.0.0.1:9", instance_id="x")
    second = serve(large.shells, instance_id="y").endpoint(standby=1)
    with Puller(target, [lost, second], {large.manifest.digest: large.manifest}) as puller:
        plan = planned(target, puller)
        lane = puller._lanes[0]
        lane.__class__ = LateLane
        puller.pull(plan, control)
    assert LateLane.looks == 2
    assert puller.coverage.target.total == large.manifest.total_bytes


# Sources of two manifests


def test_round_ends_early_when_one_manifest_is_done_long_before_the_other(fake: MakeFake, serve: Serve) -> None:
    tensors = {"a": filled("uint8", (400 * 4 * KIB,)), "b": filled("uint8", (9,))}
    slow, fast = model_of(tensors, chunk_bytes=4 * KIB), model_of({"a": tensors["a"]}, chunk_bytes=4 * KIB)
    server = paced(fake, slow, frames_per_s=100)
    endpoints = [endpoint(slow, server, "slow"), serve(fast.shells, instance_id="fast").endpoint()]
    pull = Pull(endpoints, [slow, fast], target=Shells.allocate(slow.manifest), options=BRISK).run()
    assert pull.is_complete
    assert pull.early_ends >= 1
    assert pull.codes == {}
    # Half of it each at first; by the rates that were seen then.
    assert pull.given["fast"] > 0.7 * pull.target.manifest.total_bytes
    assert {name: bits(t) for name, t in pull.target.tensors()} == {name: bits(t) for name, t in tensors.items()}
    whole = [ReadRequest.from_bytes(body) for body in server.requests]
    assert sum(region.numel for request in whole for region in request.regions) >= pull.given["slow"]


def test_number_of_early_ends_is_bounded(monkeypatch: pytest.MonkeyPatch, fake: MakeFake, serve: Serve) -> None:
    monkeypatch.setattr("weightwire.transfer.wire.puller._MAX_EARLY_ENDS", 0)
    tensors = {"a": filled("uint8", (100 * 4 * KIB,)), "b": filled("uint8", (9,))}
    slow, fast = model_of(tensors, chunk_bytes=4 * KIB), model_of({"a": tensors["a"]}, chunk_bytes=4 * KIB)
    server = paced(fake, slow, frames_per_s=100)
    endpoints = [endpoint(slow, server, "slow"), serve(fast.shells, instance_id="fast").endpoint()]
    pull = Pull(endpoints, [slow, fast], target=Shells.allocate(slow.manifest), options=BRISK).run()
    assert pull.is_complete
    assert pull.early_ends == 0


def test_rates_are_parts_of_the_fastest_and_unknown_at_first(serve: Serve, large: Model) -> None:
    other = model_of({"b": filled("uint8", (9,))})
    endpoints = [serve(large.shells, instance_id=name).endpoint() for name in ("x", "y")]
    endpoints.append(serve(other.shells, instance_id="z").endpoint())
    with Puller(
        Shells.allocate(large.manifest), endpoints, {model.manifest.digest: model.manifest for model in (large, other)}
    ) as puller:
        found = [puller.rates]
        first, second, third = puller._lanes
        first.rate, second.rate = 100.0, 300.0
        found.append(puller.rates)
        third.rate = 1.0
        found.append(puller.rates)
    # Of the third nothing is known at first: it is taken to be like the others.
    assert found == [None, [1.0, 0.5], [1.0, 0.01]]


# What is left behind


def test_nothing_is_left_of_eight_sources_that_fail_in_eight_ways(
    serve: Serve, answering: Answering, fake: MakeFake, large: Model
) -> None:
    sound = serve(large.shells, instance_id="sound")
    kinds: list[Callable[[], Fake]] = [
        lambda: answering(silent, of=large),
        lambda: answering(half, of=large),
        lambda: answering(lambda _: Closed(b""), of=large),
        lambda: answering(lambda answer: answer.text(b"x" * 9), of=large),
        lambda: answering(lambda answer: answer.text(status="500 No"), of=large),
        lambda: dribbling(fake, large),
    ]
    servers = [make() for make in kinds]
    with blackhole() as url:
        endpoints = [endpoint(large, server, f"bad-{number}") for number, server in enumerate(servers)]
        endpoints += [endpoint_of(large.manifest, url=url, instance_id="bad-6"), sound.endpoint()]
        before = len(os.listdir("/proc/self/fd"))
        pull = Pull(endpoints, [large], options=BRISK).run()
        check_all(pull, large)
        assert set(pull.codes) <= {f"bad-{number}" for number in range(7)}
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("weightwire-pull")] == []
        for server in servers:
            server.close()
        sound.server.stop()
        assert len(os.listdir("/proc/self/fd")) <= before


def test_staging_of_eight_sources_with_two_streams_is_a_chunk_each(serve: Serve) -> None:
    """The bound on memory beside the shells: 16 MiB here, where every chunk has to be staged."""
    source = torch.arange(64 << 18, dtype=torch.int32).view(4096, 4096)
    held = model_of({"a": source}, chunk_bytes=1 << 20)
    target = Shells.from_tensors({"a": torch.empty(4096, 4097, dtype=torch.int32)[:, 1:]})
    endpoints = [serve(held.shells, instance_id=f"s{number}").endpoint() for number in range(8)]
    pull = Pull(endpoints, [held], target=target, options=BRISK).run()
    assert torch.equal(target.tensor("a"), source)
    landings = [stream._landing for lane in pull.puller._lanes for stream in lane.streams]
    assert len(landings) == 16
    assert max(sum(map(len, landing._buffers)) for landing in landings if landing is not None) <= 1 << 20
