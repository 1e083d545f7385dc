"""Placement in workers: bounded, on the right device, and never half done without saying so."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from weightwire.transfer.checkpoint.reused_buffers import is_reused, mark_reused, own
from weightwire.transfer.loading.hand_off import BoundedPlacement, belongs_in_pool, default_workers

PATIENCE_S = 30.0


class Elsewhere(torch.Tensor):
    """Claims to be on an accelerator, which this machine need not have."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 3)


class FakeDevice:
    """The device of each thread; a new thread begins with 0, as a real one does."""

    def __init__(self, current: int | None) -> None:
        self.local = threading.local()
        self.local.index = current
        self.set_in: dict[str, int] = {}

    def get(self) -> int | None:
        index: int | None = getattr(self.local, "index", 0)
        return index

    def set(self, index: int) -> None:
        self.local.index = index
        self.set_in[threading.current_thread().name] = index


def workers_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weightwire-place")]


class Gate:
    """A placement that waits; knows how many tensors it has seen."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.seen = 0

    def __call__(self, tensor: torch.Tensor) -> None:
        assert self.free.wait(PATIENCE_S)
        self.seen += tensor.numel()


class Stream:
    """Makes tensors as a reader does; knows how many of them are alive."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.count):
            tensor = torch.ones(1)
            self.alive.add(tensor)
            self.most = max(self.most, len(self.alive))
            yield tensor
            del tensor


def feed(placement: BoundedPlacement, place: Callable[[torch.Tensor], object], stream: Stream) -> None:
    for tensor in stream:
        placement.submit(place, tensor)
        del tensor


def place_numbers(placement: BoundedPlacement, place: Callable[[torch.Tensor], object], count: int) -> None:
    with placement:
        for number in range(count):
            placement.submit(place, torch.tensor(number))


# L48, C12
def test_slow_worker_keeps_four_of_a_hundred_tensors_alive() -> None:
    gate, stream = Gate(), Stream(100)
    with BoundedPlacement(max_tensors=4, workers=1) as placement:
        feeding = threading.Thread(target=feed, args=(placement, gate, stream))
        feeding.start()
        pause = threading.Event()
        for _ in range(int(PATIENCE_S * 1000)):
            # The fifth is in the feeder's hands, which waits for room.
            if placement.in_flight == 4 and len(stream.alive) == 5:
                break
            pause.wait(0.001)
        assert (placement.in_flight, len(stream.alive)) == (4, 5)
        gate.free.set()
        feeding.join(PATIENCE_S)
    gc.collect()
    assert gate.seen == 100
    # Four, and the one that is being made or waits.
    assert stream.most <= 5
    assert len(stream.alive) == 0


# L48
def test_bound_in_bytes_holds_and_lets_a_larger_tensor_go_alone() -> None:
    most, sizes, lock = list[int](), list[int](), threading.Lock()

    def place(tensor: torch.Tensor) -> None:
        with lock:
            sizes.append(tensor.nbytes)
            most.append(sum(sizes))
        with lock:
            sizes.remove(tensor.nbytes)

    with BoundedPlacement(max_bytes=100, max_tensors=50, workers=4) as placement:
        for size in [40] * 20 + [400] + [40] * 20:
            placement.submit(place, torch.zeros(size, dtype=torch.uint8))
            assert placement.in_flight <= 2
    assert len(most) == 41
    assert all(total <= 80 or total == 400 for total in most)


# L131
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(torch.zeros(2), True, id="host"),
        pytest.param(mark_reused(torch.zeros(2)), False, id="marked host"),
        pytest.param(mark_reused(torch.zeros(2))[1:], False, id="view of a marked one"),
        pytest.param(torch.zeros(2, device="meta"), False, id="meta"),
        pytest.param(torch.zeros(2).as_subclass(Elsewhere), False, id="device"),
        pytest.param(object(), False, id="no device at all"),
    ],
)
def test_only_lasting_host_memory_goes_to_the_pool(value: object, expected: bool) -> None:
    assert belongs_in_pool(value) is expected


# L131
def test_what_does_not_belong_in_the_pool_is_placed_before_submit_returns() -> None:
    placed = list[str]()
    with BoundedPlacement(workers=1) as placement:
        for tensor in (torch.zeros(1, device="meta"), mark_reused(torch.zeros(1)), torch.zeros(1)):
            placement.submit(lambda _: placed.append(threading.current_thread().name), tensor)
    here = threading.current_thread().name
    assert placed[:2] == [here, here]
    assert placed[2].startswith("weightwire-place")


# L131
def test_pool_has_four_threads_more_than_cores_and_at_most_thirty_two() -> None:
    assert 5 <= default_workers() <= 32


# L132
def test_workers_get_the_device_that_was_current_at_submit() -> None:
    device, seen, together = FakeDevice(3), list[int | None](), threading.Barrier(4, timeout=PATIENCE_S)

    def place(_: torch.Tensor) -> None:
        together.wait()
        seen.append(device.get())

    with BoundedPlacement(workers=4, device=device) as placement:
        for _ in range(4):
            placement.submit(place, torch.zeros(1))
    assert seen == [3, 3, 3, 3]
    assert list(device.set_in.values()) == [3, 3, 3, 3]


# L132
def test_without_accelerator_no_device_is_set() -> None:
    device = FakeDevice(None)
    with BoundedPlacement(workers=1, device=device) as placement:
        placement.submit(lambda _: None, torch.zeros(1))
    assert device.set_in == {}


# L132
def test_one_failing_copy_of_ten_is_raised_after_all_have_ended() -> None:
    ended, lock = list[int](), threading.Lock()

    def place(tensor: torch.Tensor) -> None:
        number = int(tensor)
        try:
            if number == 4:
                raise RuntimeError("copy 4 failed")
        finally:
            with lock:
                ended.append(number)

    placement = BoundedPlacement(workers=3)
    with pytest.raises(RuntimeError, match="copy 4 failed"):
        place_numbers(placement, place, 10)
    assert sorted(ended) == list(range(10))
    assert placement.failed
    assert workers_left() == []


# L132
@pytest.mark.parametrize("workers", [pytest.param(1, id="fails first"), pytest.param(2, id="fails last")])
def test_first_failure_in_order_of_submission_is_the_one_that_is_raised(workers: int) -> None:
    later = threading.Event()

    def place(tensor: torch.Tensor) -> None:
        if int(tensor) == 1:
            later.set()
        elif workers == 2:
            assert later.wait(PATIENCE_S)
        # Not an Exception: it must not pass for success either.
        raise SystemExit(int(tensor))

    with pytest.raises(SystemExit) as caught:
        place_numbers(BoundedPlacement(workers=workers), place, 2)
    assert caught.value.code == 0


def test_error_of_the_stream_drops_what_waits_and_is_what_is_raised() -> None:
    gate = Gate()

    def run() -> None:
        with BoundedPlacement(max_tensors=8, workers=1) as placement:
            for _ in range(5):
                placement.submit(gate, torch.ones(1))
            threading.Timer(0.01, gate.free.set).start()
            raise ValueError("the stream broke")

    with pytest.raises(ValueError, match="the stream broke"):
        run()
    assert gate.seen <= 1
    assert workers_left() == []


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("max_tensors", lambda: BoundedPlacement(max_tensors=0)),
        ("max_bytes", lambda: BoundedPlacement(max_bytes=0)),
        ("workers", lambda: BoundedPlacement(workers=0)),
    ],
)
def test_bound_that_lets_nothing_through_is_refused(name: str, make: Callable[[], BoundedPlacement]) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        make()


# L47
def test_mark_is_on_tensor_and_storage_and_goes_with_every_view() -> None:
    buffer = mark_reused(torch.arange(4.0))
    for tensor in (buffer, buffer[1:], buffer.view(2, 2), buffer.view(torch.int32), buffer.detach()):
        assert is_reused(tensor)
    assert is_reused(torch.empty(0).set_(buffer.untyped_storage()))
    gc.collect()
    assert is_reused(buffer[2:])
    assert not is_reused(torch.zeros(1))


class OneBuffer:
    """A streaming reader that fills one buffer again and again."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = mark_reused(torch.empty(2))
        for number in range(3):
            buffer.fill_(number)
            yield f"t{number}", buffer


# L47
def test_pair_kept_across_a_pull_equals_its_first_content() -> None:
    kept = {name: own(tensor) for name, tensor in OneBuffer()}
    assert [tensor.tolist() for tensor in kept.values()] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert not any(is_reused(tensor) for tensor in kept.values())


# L47
def test_tensor_without_mark_is_its_own() -> None:
    tensor = torch.zeros(2)
    assert own(tensor) is tensor
