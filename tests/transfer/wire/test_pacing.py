"""How bytes are let go: the bucket by a clock of the test's own, the pacer with threads that wait."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.conftest import PATIENCE_S, Serve, filled
from weightwire.transfer.errors import FencedError
from weightwire.transfer.planning import plan_pull
from weightwire.transfer.regions import row_major
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.framing import ReadRequest
from weightwire.transfer.wire.limits import SourceLimits
from weightwire.transfer.wire.pacing import MIN_BYTES_PER_S, Pacer, TokenBucket, Turn
from weightwire.transfer.wire.segments import cut_segments
from weightwire.transfer.wire.stream import SourceStream

MB = 10**6
RATES = st.integers(MIN_BYTES_PER_S, 10**10)


@dataclass
class Readers:
    """Readers that always want more, at a bucket, by a clock that jumps to whatever comes next."""

    bucket: TokenBucket
    now: float = 0.0
    got: Counter[int] = field(default_factory=Counter)
    last: dict[int, float] = field(default_factory=dict)
    longest_s: float = 0.0
    turns: dict[int, Turn] = field(default_factory=dict)

    def ask(self, reader: int, at_most: int = 1 << 20) -> None:
        self.turns[reader] = Turn(self.bucket.quantum(at_most))
        self.bucket.join(self.turns[reader])
        self.last.setdefault(reader, self.now)

    def run(self, until: float, *, oversleep_s: float = 0.0) -> None:
        """Serve whoever is next until the time is over; each asks again at once."""
        while True:
            reader = next(number for number, turn in self.turns.items() if turn is self.bucket.head)
            turn = self.turns[reader]
            if (wait_s := self.bucket.poll(turn, now=self.now)) > 0:
                if self.now + wait_s > until:
                    self.now = until
                    return
                self.now += wait_s + oversleep_s
                continue
            self.got[reader] += turn.nbytes
            self.longest_s = max(self.longest_s, self.now - self.last[reader])
            self.last[reader] = self.now
            self.ask(reader)


@pytest.mark.parametrize("rate", [MIN_BYTES_PER_S, 3 * MB, 200 * MB, 10**10])
@pytest.mark.parametrize("number", [1, 2, 8, 64])
def test_readers_get_equal_shares_and_the_rate_in_sum(rate: int, number: int) -> None:
    readers = Readers(TokenBucket(rate, now=0.0))
    for reader in range(number):
        readers.ask(reader)
    seconds = 20.0 if rate < 10**9 else 1.0
    readers.run(seconds)
    allowed = rate * seconds + readers.bucket.burst_bytes
    assert 0.99 * rate * seconds <= readers.got.total() <= allowed
    shares = [readers.got[reader] for reader in range(number)]
    assert max(shares) - min(shares) <= 2 * (1 << 20)


@pytest.mark.parametrize("number", [1, 8, 64])
def test_slow_cap_trickles_to_every_reader_several_times_a_second(number: int) -> None:
    readers = Readers(TokenBucket(2 * MB, now=0.0))
    for reader in range(number):
        readers.ask(reader)
    readers.run(10.0)
    assert readers.longest_s < 0.34


def test_threads_that_oversleep_do_not_cost_the_rate() -> None:
    readers = Readers(TokenBucket(50 * MB, now=0.0))
    readers.ask(0)
    readers.run(10.0, oversleep_s=0.05)
    assert readers.got.total() >= 0.99 * 10 * 50 * MB


@given(rate=RATES, steps=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 1 << 24)), max_size=60))
def test_no_window_gets_more_than_its_time_and_one_burst(rate: int, steps: list[tuple[float, int]]) -> None:
    bucket = TokenBucket(rate, now=0.0)
    now, taken = 0.0, list[tuple[float, int]]()
    waiting = list[Turn]()
    for pause, at_most in steps:
        now += pause
        turn = Turn(bucket.quantum(at_most))
        bucket.join(turn)
        waiting.append(turn)
        while waiting and bucket.poll(waiting[0], now=now) == 0:
            taken.append((now, waiting.pop(0).nbytes))
    for index, (begin, _) in enumerate(taken):
        total = 0
        for at, nbytes in taken[index:]:
            total += nbytes
            assert total <= (rate * (at - begin) + bucket.burst_bytes) * (1 + 1e-5) + 1


@given(
    first=RATES | st.none(),
    changes=st.lists(st.tuples(st.floats(0.01, 2), RATES | st.none()), max_size=6),
    last=RATES,
    asked=st.lists(st.integers(1, 1 << 24), min_size=1, max_size=10),
)
def test_no_reader_starves_whatever_the_rate_becomes(
    first: int | None, changes: list[tuple[float, int | None]], last: int, asked: list[int]
) -> None:
    bucket = TokenBucket(first, now=0.0)
    now = 0.0
    turns = [Turn(0) for _ in asked]
    for turn, at_most in zip(turns, asked, strict=True):
        turn.nbytes = bucket.quantum(at_most)
        assert 1 <= turn.nbytes <= at_most
        bucket.join(turn)
    for pause, rate in [*changes, (0.01, last)]:
        now += pause
        bucket.set_rate(rate, now=now)
    for turn in [turn for turn in turns if turn in bucket.waiting]:
        polls = 0
        while (wait_s := bucket.poll(turn, now=now)) > 0:
            assert wait_s < float("inf")
            now += wait_s
            polls += 1
            assert polls < 10
    assert bucket.head is None


def test_turns_come_in_the_order_of_asking_and_one_that_leaves_holds_nobody_up() -> None:
    bucket = TokenBucket(MIN_BYTES_PER_S, now=0.0)
    first, second, third = (Turn(bucket.quantum(1 << 20)) for _ in range(3))
    for turn in (first, second, third):
        bucket.join(turn)
    assert bucket.poll(second, now=0.0) == float("inf")
    bucket.leave(first)
    bucket.leave(first)
    assert bucket.poll(second, now=0.0) == 0
    assert bucket.head is third


def test_bucket_without_a_limit_lets_everything_go_at_once() -> None:
    bucket = TokenBucket(None, now=0.0)
    turn = Turn(bucket.quantum(1 << 40))
    bucket.join(turn)
    assert turn.nbytes == 1 << 40
    assert bucket.poll(turn, now=0.0) == 0
    bucket.set_rate(MIN_BYTES_PER_S, now=100.0)
    late = Turn(1 << 12)
    bucket.join(late)
    assert bucket.poll(late, now=100.0) == pytest.approx((1 << 12) / MIN_BYTES_PER_S), "nothing was saved up"


# Threads


def no_look() -> None:
    pass


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_rate_that_is_taken_away_lets_those_who_wait_go() -> None:
    pacer = Pacer(MIN_BYTES_PER_S)
    granted = list[int]()
    waiting = threading.Event()

    def read() -> None:
        while sum(granted) < 1 << 30:
            granted.append(pacer.take((1 << 30) - sum(granted), while_waiting=no_look))
            waiting.set()

    threads = [in_background(read)]
    assert waiting.wait(PATIENCE_S)
    pacer.set_rate(None)
    threads[0].join(PATIENCE_S)
    assert sum(granted) == 1 << 30
    assert pacer.bytes_per_s is None


def test_reader_that_gives_its_turn_up_passes_it_on() -> None:
    pacer = Pacer(MIN_BYTES_PER_S)
    looked, over = threading.Event(), threading.Event()

    def impatient() -> None:
        looked.set()
        raise KeyError

    def take_until_it_raises() -> None:
        with contextlib.suppress(KeyError):
            while not over.is_set():
                pacer.take(1 << 20, while_waiting=impatient)

    # So many at such a rate that some wait longer than it takes to be asked whether they still want to.
    threads = [in_background(take_until_it_raises) for _ in range(24)]
    assert looked.wait(PATIENCE_S)
    for _ in range(3):
        assert pacer.take(1 << 12, while_waiting=no_look) == 1 << 12
    over.set()
    pacer.set_rate(None)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [thread for thread in threads if thread.is_alive()] == []
    assert pacer.take(1, while_waiting=no_look) == 1


# Over sockets


def wait_until(true: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + PATIENCE_S
    while not true() and time.monotonic() < ends_at:
        time.sleep(0)
    assert true()


def test_source_with_a_rate_sends_the_same_bytes_and_counts_them(serve: Serve) -> None:
    tensors = {"a": filled("float32", (40_000,)), "b": filled("uint8", (7,))}
    served = serve(tensors, chunk_bytes=1 << 16, limits=SourceLimits(max_bytes_per_s=8 * MB))
    sent = served.source.capacity
    (copies,) = plan_pull(served.manifest, [served.manifest]).copies
    segments = list(cut_segments(served.manifest, copies, num_streams=1))
    target = Shells.allocate(served.manifest)
    stream = SourceStream(served.endpoint(), served.manifest)
    frames = list(stream.fetch(segments, target))
    stream.close()
    served.source.withdraw(drain_s=PATIENCE_S)
    assert [target.digest(name) for name in tensors] == [tensor.digest for tensor in served.manifest.tensors]
    assert sent.bytes_sent == stream.meter.received > 160_007 + 20 * len(frames)


def test_frame_that_has_begun_when_the_weights_go_ends_void_for_a_reader_that_cannot_be_told_to_wait(
    serve: Serve,
) -> None:
    """The rest of the frame goes at once, for its trailer is where the reader learns that it is torn."""
    served = serve({"a": filled("uint8", (1 << 20,))}, chunk_bytes=1 << 19)
    served.source.set_limits(SourceLimits(max_bytes_per_s=MIN_BYTES_PER_S))
    endpoint = served.endpoint()
    request = ReadRequest(
        generation=endpoint.generation, weight_version=endpoint.weight_version, manifest=endpoint.manifest,
        target_instance=endpoint.target_instance, target_rank=0, regions=(row_major((1 << 20,)),),
    )  # fmt: skip
    headers = {"Authorization": f"Ticket {endpoint.ticket}", "Weightwire-Protocol": "1.0"}
    connection = http.client.HTTPConnection(served.server.address.host, served.server.address.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/read", request.to_bytes(), headers)
    answer = connection.getresponse()
    body = answer.read(64)
    served.source.withdraw(drain_s=0)
    with pytest.raises(http.client.IncompleteRead) as cut:
        answer.read()
    body += cut.value.partial
    connection.close()
    frame = 8 + (1 << 19)
    assert body[:4] == b"DATA"
    assert body[frame : frame + 4] == b"VOID"
    assert body[frame + 12 : frame + 16] == b"FAIL"


def test_turn_that_nobody_attends_keeps_its_place_and_holds_nobody_up() -> None:
    bucket = TokenBucket(MIN_BYTES_PER_S, now=0.0)
    first, second = (Turn(bucket.quantum(1 << 20)) for _ in range(2))
    bucket.join(first)
    bucket.join(second)
    first.is_attended = False
    assert bucket.head is second
    assert bucket.poll(second, now=0.0) == 0
    assert bucket.waiting == (first,)
    first.is_attended = True
    assert bucket.head is first


def test_reader_that_understands_it_is_told_to_wait_and_gets_whole_frames(serve: Serve) -> None:
    served = serve({"a": filled("uint8", (1 << 16,))}, chunk_bytes=1 << 16)
    (copies,) = plan_pull(served.manifest, [served.manifest]).copies
    segments = list(cut_segments(served.manifest, copies, num_streams=1))
    served.source.set_limits(SourceLimits(max_bytes_per_s=MIN_BYTES_PER_S))
    stream = SourceStream(served.endpoint(), served.manifest)
    target = Shells.allocate(served.manifest)
    assert len(list(stream.fetch(segments, target))) == 1
    assert stream.meter.waits > 0
    stream.close()
    assert target.digest("a") == served.manifest.by_name["a"].digest


def test_reader_that_is_told_to_wait_hears_at_once_that_the_weights_go(serve: Serve) -> None:
    served = serve({"a": filled("uint8", (1 << 20,))}, chunk_bytes=1 << 19)
    (copies,) = plan_pull(served.manifest, [served.manifest]).copies
    segments = list(cut_segments(served.manifest, copies, num_streams=1))
    served.source.set_limits(SourceLimits(max_bytes_per_s=MIN_BYTES_PER_S))
    stream = SourceStream(served.endpoint(), served.manifest)

    def leave() -> None:
        wait_until(lambda: stream.meter.waits > 1)
        served.source.withdraw(drain_s=0)

    leaving = in_background(leave)
    with pytest.raises(FencedError, match="withdrawn while it was read"):
        list(stream.fetch(segments, Shells.allocate(served.manifest)))
    leaving.join(PATIENCE_S)
    stream.close()
    # Not a byte of a frame of eight seconds was sent.
    assert stream.meter.received < 1 << 16
