"""Shells that are reached through pinned buffers: the same bytes as of plain ones, never read or reused too early.

The first half runs on the CPU's memory, forced through the buffers, on a device whose copies are as late as they may
be, and in tests/gpu on a real one.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.transfer.conftest import (
    PATIENCE_S,
    VERSION,
    MakeFake,
    Serve,
    Served,
    bits,
    endpoint_of,
    filled,
    read_request,
    views_of,
)
from tests.transfer.late_device import LateDevice
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.cuda_copies import CudaMark
from weightwire.transfer.device_shells import Span
from weightwire.transfer.errors import DeviceError, ManifestError, SourceRefusedError, SourceUnreachableError
from weightwire.transfer.filling import FillResult, Origins, fill
from weightwire.transfer.layouts import Layout, ModelIdentity
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.placement import PlacedConstant, PlacedPiece, ShellPlacement
from weightwire.transfer.planning import plan_pull
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.saving import save_rank
from weightwire.transfer.shells import Shells
from weightwire.transfer.staging import Staging, open_device
from weightwire.transfer.wire.framing import Frame
from weightwire.transfer.wire.puller import PullOptions
from weightwire.transfer.wire.segments import Segment, cut_segments
from weightwire.transfer.wire.source import Publication, Source, SourceIdentity
from weightwire.transfer.wire.stream import Damage, SourceStream, Timeouts

LONG = Timeouts(connect_s=PATIENCE_S, stall_s=PATIENCE_S)
DTYPES = ("uint8", "bfloat16", "float32", "bool", "complex64")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where shells lie, and how they are reached.

    Attributes:
        device: Of the tensors.
        staging: How `Shells` get there.
    """

    device: str = "cpu"
    staging: Staging = field(default_factory=Staging)

    def like(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The same views, each of an allocation of its own, there."""
        moved = {}
        for name, tensor in tensors.items():
            memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(self.device, copy=True)
            moved[name] = memory.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return moved

    def hold(self, tensors: Tensors, *, chunk_bytes: int = 64) -> Shells:
        """Copies of tensors, strides and all."""
        identity = ModelIdentity(model="m")
        return Shells.from_tensors(self.like(tensors), identity, chunk_bytes=chunk_bytes).through(self.staging)

    def want(self, tensors: Tensors, *, chunk_bytes: int = 64) -> Shells:
        """Shells for such tensors, none of whose bytes are right."""
        shells = self.hold(tensors, chunk_bytes=chunk_bytes)
        shells.fill(0xAB)
        return shells


def host(tensor: torch.Tensor) -> bytes:
    """Bits of a tensor on any device."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return bits(flat.cpu().as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset())))


def contents(shells: Shells | Tensors) -> dict[str, bytes]:
    items = shells.tensors() if isinstance(shells, Shells) else shells.items()
    return {name: host(tensor) for name, tensor in items}


def joined(views: Sequence[memoryview]) -> bytes:
    return b"".join(views)


@pytest.fixture(params=["forced on the CPU", "late copies"])
def place(request: pytest.FixtureRequest) -> Place:
    late = request.param == "late copies"
    return Place(staging=LateDevice().staging if late else Staging(mode="always"))


def run(shells: Shells, *served: Served, disk: Checkpoint | None = None, streams: int = 2) -> FillResult:
    endpoints = [each.endpoint() for each in served]
    manifests = {each.manifest.digest: each.manifest for each in served}
    where = Origins(endpoints=endpoints, manifests=manifests, checkpoint=disk)
    options = PullOptions(timeouts=LONG, streams=streams)
    return fill(shells, where, control=Control(deadline_s=PATIENCE_S), options=options)


# The same bytes as plain shells


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_are_those_of_plain_shells(place: Place, dtype: str) -> None:
    tensors = views_of(dtype)
    plain = Place().hold(tensors, chunk_bytes=48)
    assert place.hold(tensors, chunk_bytes=48).seal() == plain.seal()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_scatter_take_every_view_bit_for_bit(place: Place, dtype: str) -> None:
    tensors = views_of(dtype)
    held, wanted = place.hold(tensors), place.want(tensors)
    for entry in held.manifest.tensors:
        region = held.manifest.flat_region(entry)
        raw = joined(held.gather(region))
        assert raw == bits(tensors[entry.name]), entry.name
        begin, end = min(3, len(raw)), min(11, len(raw))
        assert joined(held.gather(region, begin, end)) == raw[begin:end], entry.name
        for begin in range(0, len(raw), 7):
            wanted.scatter(memoryview(bytearray(raw))[begin : begin + 7], region, begin)
        assert host(wanted.tensor(entry.name)) == raw, entry.name


def test_steps_are_a_chunk_each_and_whole_together(place: Place) -> None:
    tensor = filled("float32", (9, 11)).T
    held = place.hold({"t": tensor}, chunk_bytes=40)
    sizes, seen = [], b""
    for views in held.steps(held.manifest.flat_region(held.manifest.tensors[0])):
        sizes.append(sum(map(len, views)))
        seen += joined(views)
    assert sizes == [40] * 9 + [36]
    assert seen == bits(tensor)


def test_memory_is_not_handed_out(place: Place) -> None:
    held = place.hold({"t": filled("uint8", (8,))})
    assert held.direct(0, 8) is None
    with pytest.raises(ValueError, match="expected plain memory"):
        held.views(0, 8)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 20])
def test_pull_moves_every_view_from_and_to_staged_shells(serve: Serve, place: Place, chunk_bytes: int) -> None:
    tensors = views_of("int16")
    flat = {name: filled("int16", tuple(tensor.shape)) for name, tensor in tensors.items()}
    for source in (Place(), place):
        served = serve(source.hold(tensors, chunk_bytes=chunk_bytes), instance_id=f"s{chunk_bytes}{source is place}")
        for layout in (tensors, flat):
            target = place.want(layout, chunk_bytes=chunk_bytes)
            run(target, served)
            assert contents(target) == contents(tensors)
        back = Place().want(flat, chunk_bytes=chunk_bytes)
        run(back, served)
        assert contents(back) == contents(tensors)


def test_many_small_tensors_arrive_in_another_order(serve: Serve, place: Place) -> None:
    tensors = {f"t{number}": torch.full((3,), number) for number in range(500)}
    target = place.want(dict(reversed(tensors.items())), chunk_bytes=256)
    run(target, serve(place.hold(tensors, chunk_bytes=256)))
    assert contents(target) == contents(tensors)


def test_disk_gives_what_no_source_has_whole_strided_and_cast(serve: Serve, place: Place, tmp_path: Path) -> None:
    on_disk = {"a": filled("float32", (6, 8)), "b": filled("float32", (5, 7), seed=1), "c": torch.arange(12.0)}
    save_file(on_disk, tmp_path / "model.safetensors")
    layout = {"a": on_disk["a"], "b": torch.empty(7, 5).T, "d": torch.empty(8)}
    shells = place.like(layout)
    placed = {
        **{name: ShellPlacement(pieces=(PlacedPiece.of(name, checkpoint=row_major(s), runtime=_region(layout[name])),))
           for name, s in (("a", (6, 8)), ("b", (5, 7)))},
        "d": ShellPlacement(
            pieces=(PlacedPiece.of("c", checkpoint=row_major((6,), offset=2), runtime=row_major((6,))),),
            constants=(PlacedConstant(runtime=row_major((2,), offset=6), value=0.0),),
        ),
    }  # fmt: skip
    target = Shells.from_layout(Layout.of(shells, ModelIdentity(model="m"), placed)).through(place.staging)
    target.fill(0xAB)
    with Checkpoint.open(tmp_path) as disk:
        result = run(target, serve(place.hold({"a": on_disk["a"]})), disk=disk)
    assert result.bytes_peer == 192
    expected = {"a": on_disk["a"], "b": on_disk["b"], "d": torch.cat([on_disk["c"][2:8], torch.zeros(2)])}
    assert contents(target) == contents(expected)


def _region(tensor: torch.Tensor) -> Region:
    return Region(offset=0, shape=tuple(tensor.shape), strides=tensor.stride())


def test_saved_file_and_what_the_source_exports_are_those_of_plain_shells(
    serve: Serve, place: Place, tmp_path: Path
) -> None:
    tensors = {"a": filled("bfloat16", (7, 9)).T, "b": filled("uint8", (100,)), "c": filled("float32", (3, 3))}
    held = place.hold(tensors)
    saved = load_file(save_rank(held, tmp_path))
    assert contents(saved) == contents(tensors)
    url = serve(held).server.url
    for name, tensor in tensors.items():
        with urlopen(Request(f"{url}/v1/tensors/{name}", headers={"Range": "bytes=3-"}), timeout=PATIENCE_S) as answer:
            assert answer.read() == bits(tensor)[3:]
    with urlopen(f"{url}/v1/export.safetensors", timeout=PATIENCE_S) as answer:
        assert answer.read() == (tmp_path / "rank-0.safetensors").read_bytes()


def test_module_is_filled_in_place(serve: Serve, place: Place) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)).to(place.device)
    module.requires_grad_(False)
    values = {name: filled(_name(t), tuple(t.shape), seed=9) for name, t in module.state_dict().items()}
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    run(Shells.from_module(module, ModelIdentity(model="m")).through(place.staging), serve(place.hold(values)))
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == before
    assert contents(module.state_dict()) == contents(values)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Partly(Shells):
    """Of these every second storage is plain: stands in for a model of which a part lies on the CPU."""

    def __init__(self, manifest: Manifest, storages: Iterable[torch.Tensor], staging: Staging | None = None) -> None:
        super().__init__(manifest, storages, staging)
        for number in range(0, len(self._filled), 2):
            self._plain[number] = True
            self._views[number] = self._filled[number].numpy().data


def test_model_that_is_plain_in_part_is_read_and_written_whole(serve: Serve) -> None:
    device = LateDevice()
    tensors = {f"t{number}": filled("uint8", (size,)) for number, size in enumerate((40, 30, 5, 3, 64))}
    empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    layout, identity = Layout.of(tensors, ModelIdentity(model="m"), chunk_bytes=16), ModelIdentity(model="m")
    held = Partly(layout.manifest, tensors.values(), device.staging)
    target = Partly(Layout.of(empty, identity, chunk_bytes=16).manifest, empty.values(), device.staging)
    assert held.seal() == Place().hold(tensors, chunk_bytes=16).seal()
    assert held.views(0, 40) == [bits(tensors["t0"])]
    assert held.direct(0, 40) is held.direct(40, 70) is None
    run(target, serve(held), streams=1)
    assert contents(target) == contents(tensors)
    assert device.in_flight == 0


# When buffers are free, and frames are there


TEN = {"t": filled("uint8", (160,))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A frame of a connection that a test plays itself."""

    payload: memoryview
    scattered: Sequence[Span]
    number: int


def receive(shells: Shells, raw: bytes, each: Callable[[], object]) -> Generator[Received, None, None]:
    """16 bytes at a time; `each` is called when one has been read and not been handed over."""
    landing = shells.landing(16)

    def arriving() -> Generator[Received, None, None]:
        region = Region(offset=0, shape=(len(raw),), strides=(1,))
        # Their buffers are dealt out before the first is read, as the stream does.
        buffers = [landing.buffer(16) for _ in range(len(raw) // 16)]
        for number, buffer in enumerate(buffers):
            buffer[:] = raw[number * 16 : number * 16 + 16]
            each()
            yield Received(payload=buffer, scattered=[(region, number * 16, number * 16 + 16)], number=number)

    return landing.landed(arriving())


def test_frame_is_received_while_the_one_before_is_copied_and_handed_on_when_it_is_there() -> None:
    device, seen = LateDevice(), list[int]()
    shells = Place(staging=device.staging).want(TEN, chunk_bytes=16)
    raw = bits(TEN["t"])
    for received in receive(shells, raw, lambda: seen.append(device.in_flight)):
        at = received.number * 16
        assert bits(shells.tensor("t"))[at : at + 16] == raw[at : at + 16]
    assert seen == [0] + [1] * 9
    assert bits(shells.tensor("t")) == raw
    assert device.in_flight == 0


def test_frames_before_a_broken_connection_are_handed_on_first() -> None:
    device, handed = LateDevice(), list[int]()
    shells = Place(staging=device.staging).want(TEN, chunk_bytes=16)
    left = iter(range(4))

    def breaks() -> None:
        if next(left) == 3:
            raise SourceUnreachableError("gone")

    with pytest.raises(SourceUnreachableError):
        handed.extend(received.number for received in receive(shells, bits(TEN["t"]), breaks))
    assert handed == [0, 1, 2]
    assert bits(shells.tensor("t"))[:48] == bits(TEN["t"])[:48]


def test_connection_that_ends_in_whatever_way_leaves_no_copy_behind() -> None:
    device = LateDevice()
    shells = Place(staging=device.staging).want(TEN, chunk_bytes=16)
    left = iter(range(4))

    def breaks() -> None:
        if next(left) == 3:
            assert device.in_flight == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(receive(shells, bits(TEN["t"]), breaks))
    assert device.in_flight == 0


def test_no_byte_of_a_frame_is_written_before_the_one_in_front_was_taken_and_the_next_is_asked_for() -> None:
    device, received = LateDevice(), list[int]()
    shells = Place(staging=device.staging).want(TEN, chunk_bytes=16)
    frames = receive(shells, bits(TEN["t"]), lambda: received.append(len(received)))
    assert next(frames).number == 0
    assert received == [0, 1]
    assert bits(shells.tensor("t")) == bits(TEN["t"])[:16] + b"\xab" * 144
    frames.close()
    assert bits(shells.tensor("t")) == bits(TEN["t"])[:16] + b"\xab" * 144
    assert device.in_flight == 0


def test_source_is_not_taken_for_slow_while_our_device_is_late() -> None:
    device, seen = LateDevice(is_stuck=True), list[str]()

    @contextlib.contextmanager
    def stuck() -> Iterator[None]:
        seen.append("begins")
        device.is_stuck = False
        yield
        seen.append("ends")

    shells = Place(staging=device.staging).want(TEN, chunk_bytes=16)
    landing = shells.landing(16, stuck)

    def arriving() -> Generator[Received, None, None]:
        whole = Region(offset=0, shape=(160,), strides=(1,))
        buffer = landing.buffer(16)
        buffer[:] = bytes(16)
        yield Received(payload=buffer, scattered=[(whole, 0, 16)], number=0)

    assert [received.number for received in landing.landed(arriving())] == [0]
    assert seen == ["begins", "ends"]
    assert bits(shells.tensor("t"))[:16] == bytes(16)


def test_departure_copies_ahead_and_waits_for_what_nobody_wants() -> None:
    device = LateDevice()
    held = Place(staging=device.staging).hold(TEN, chunk_bytes=16)
    region = Region(offset=0, shape=(160,), strides=(1,))
    spans = [[(region, begin, end)] for begin, end in pairwise(range(0, 161, 16))]
    raw = bits(TEN["t"])
    with held.departure() as departure:
        first = departure.gather(spans[0])
        departure.ahead(spans[1])
        assert device.in_flight == 1
        assert joined(first) == raw[:16]
        assert joined(departure.gather(spans[5])) == raw[80:96]
        departure.ahead(spans[6])
        assert joined(departure.gather(spans[6])) == raw[96:112]
        departure.ahead(spans[7])
    assert device.in_flight == 0
    assert device.most_pinned_bytes == 32


class Watched(Source):
    """Notes when it is asked whether a publication stands: before a frame is read, and once it is sent."""

    log: list[str]

    def check_stands(self, publication: Publication) -> None:
        self.log.append("stands")
        super().check_stands(publication)


def test_source_copies_the_next_frame_while_it_sends_one(serve: Serve) -> None:
    device = LateDevice()
    served = serve(Place(staging=device.staging).hold({"t": filled("uint8", (48,))}, chunk_bytes=16))
    served.source.__class__ = Watched
    vars(served.source)["log"] = device.log
    device.log.clear()
    fetch(served, Place().want({"t": filled("uint8", (48,))}, chunk_bytes=16))
    sent = "stands"
    assert device.log == [
        "stands",
        "copy",
        "wait",
        "copy",
        sent,
        "stands",
        "wait",
        "copy",
        sent,
        "stands",
        "wait",
        sent,
    ]


def segments_of(manifest: Manifest, target: Shells) -> list[Segment]:
    (copies,) = plan_pull(target.manifest, [manifest]).copies
    return list(cut_segments(manifest, copies, num_streams=1))


def fetch(served: Served, target: Shells) -> list[Frame | Damage]:
    stream = SourceStream(served.endpoint(), served.manifest, timeouts=LONG)
    try:
        return list(stream.fetch(segments_of(served.manifest, target), target))
    finally:
        stream.close()


def test_disk_is_copied_in_the_device_s_own_queues(tmp_path: Path) -> None:
    device = LateDevice()
    tensors = {"a": filled("float32", (6, 8)), "b": filled("uint8", (77,))}
    save_file(tensors, tmp_path / "model.safetensors")
    target = Place(staging=device.staging).want(tensors)
    with Checkpoint.open(tmp_path) as disk:
        run(target, disk=disk)
    assert contents(target) == contents(tensors)
    assert (device.made, device.in_flight) == (2, 0)


# Memory


@pytest.mark.parametrize("streams", [1, 3])
def test_each_stream_and_reader_has_two_chunks_however_large_the_model_is(serve: Serve, streams: int) -> None:
    tensors = {"a": filled("uint8", (100, 300)), "b": filled("float32", (70, 50)).T, "c": filled("uint8", (9999,))}
    giving, taking = LateDevice(), LateDevice()
    served = serve(Place(staging=giving.staging).hold(tensors, chunk_bytes=512))
    target = Place(staging=taking.staging).want(tensors, chunk_bytes=512)
    before = len(giving.copiers)
    run(target, served, streams=streams)
    assert contents(target) == contents(tensors)
    assert giving.most_pinned_bytes == taking.most_pinned_bytes == 2 * 512
    # Of the streams; digests that no chunk proves are compared one after the other, each with buffers of its own.
    pinned = sorted((copier.pinned_bytes for copier in taking.copiers), reverse=True)
    assert sum(pinned) <= (streams + len(tensors)) * 2 * 512
    assert all(copier.pinned_bytes <= 2 * 512 for copier in giving.copiers[before:])


def test_plain_shells_need_one_chunk_and_only_for_what_is_strided() -> None:
    plain = Place().hold({"t": filled("uint8", (160,))}, chunk_bytes=16)
    landing = plain.landing(16)
    first, second = landing.buffer(16), landing.buffer(16)
    first[:] = bytes(range(16))
    assert second.tobytes() == bytes(range(16))
    assert plain.direct(0, 160) is not None
    assert not plain.devices


# Faults


def test_copy_that_fails_ends_the_transfer_and_is_nobody_elses_fault(serve: Serve) -> None:
    device = LateDevice(fails_at=4)
    target = Place(staging=device.staging).want(TEN, chunk_bytes=16)
    servers = [serve(TEN, chunk_bytes=16, instance_id=name) for name in ("s", "r")]
    with pytest.raises(DeviceError, match=r"failed: an illegal memory access was encountered$") as caught:
        run(target, *servers)
    assert caught.value.code == "device_copy_failed"
    assert "source" not in str(caught.value)


def test_copy_that_does_not_end_is_not_waited_for_for_ever(serve: Serve) -> None:
    device = LateDevice(is_stuck=True)
    target = Place(staging=device.staging).want(TEN, chunk_bytes=16)
    with pytest.raises(DeviceError, match="not done within 60 s"):
        run(target, serve(TEN, chunk_bytes=16))


def test_frame_whose_copy_fails_is_not_handed_on(serve: Serve) -> None:
    device, handed = LateDevice(fails_at=3), list[int]()
    shells = Place(staging=device.staging).want(TEN, chunk_bytes=16)
    with pytest.raises(DeviceError):
        handed.extend(received.number for received in receive(shells, bits(TEN["t"]), lambda: None))
    assert handed == [0, 1]


def test_source_whose_device_fails_says_so_and_the_disk_gives_the_rest(serve: Serve, tmp_path: Path) -> None:
    device = LateDevice()
    bad = serve(Place(staging=device.staging).hold(TEN, chunk_bytes=16), instance_id="bad")
    # Of the frames that the reader asks for, the third.
    device.fails_at = device.made + 3
    save_file(dict(TEN), tmp_path / "model.safetensors")
    target = Place().want(TEN, chunk_bytes=16)
    with Checkpoint.open(tmp_path) as disk:
        result = run(target, bad, disk=disk, streams=1)
    assert contents(target) == contents(TEN)
    assert (result.bytes_peer, result.bytes_disk) == (32, 128)
    (failure,) = result.failures
    assert (failure.instance_id, failure.code) == ("bad", "source_failed")
    assert "an illegal memory access" in failure.detail


def test_source_that_speaks_of_its_device_does_not_stop_the_transfer(fake: MakeFake) -> None:
    manifest = Place().hold(TEN, chunk_bytes=16).seal()
    problem = b'{"code":"device_copy_failed","detail":"x"}'
    head = b"HTTP/1.1 500 X\r\nContent-Type: application/problem+json\r\nContent-Length: %d\r\n\r\n" % len(problem)

    def converse(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(head + problem)

    endpoint = endpoint_of(manifest, url=fake(converse).url)
    target = Place().want(TEN, chunk_bytes=16)
    stream = SourceStream(endpoint, manifest, timeouts=LONG)
    with pytest.raises(SourceRefusedError, match="x"):
        list(stream.fetch(segments_of(manifest, target), target))
    stream.close()


# Fences, and what is no device


def test_copies_come_after_what_was_written_before_seal_publish_and_fill(serve: Serve) -> None:
    device = LateDevice()
    shells = Place(staging=device.staging).hold(TEN, chunk_bytes=16)
    shells.seal()
    assert device.log[:2] == ["fence", "copy"]
    device.log.clear()
    Source(SourceIdentity(instance_id="s")).publish(shells, weight_version=VERSION)
    assert device.log == ["fence"]
    device.log.clear()
    run(shells, serve(TEN, chunk_bytes=16))
    assert device.log[0] == "fence"


def test_constants_and_fills_are_seen_by_the_copies_behind_them() -> None:
    device = LateDevice()
    shells = Place(staging=device.staging).hold({"t": torch.zeros(4)})
    shells.fill_constant("t", PlacedConstant(runtime=row_major((2,)), value=1.0))
    shells.fill(7)
    assert device.log == ["fence", "fence"]


@pytest.mark.parametrize("device", ["meta", "mps", "xpu:1"])
def test_device_that_nobody_copies_from_is_refused(device: str) -> None:
    with pytest.raises(ManifestError, match=f"device {device}: expected one of cpu, cuda"):
        open_device(torch.device(device))


@dataclass(kw_only=True)
class SlowEvent:
    """Done when it has been asked so often."""

    queries: int

    def query(self) -> bool:
        self.queries -= 1
        return self.queries < 0


@pytest.mark.parametrize(
    ("queries", "timeout_s", "done"),
    [
        pytest.param(0, 0.0, True, id="done already"),
        pytest.param(3, PATIENCE_S, True, id="done after a while"),
        pytest.param(1 << 40, 0.0, False, id="not done in time"),
    ],
)
def test_event_is_waited_for_until_the_time_is_over(queries: int, timeout_s: float, done: bool) -> None:
    event = SlowEvent(queries=queries)
    assert CudaMark(event).wait(timeout_s) is done  # type: ignore[arg-type]
