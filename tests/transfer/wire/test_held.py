"""What a receiving target already has: only what the origin's digests prove, and how long one waits for the rest."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.conftest import PATIENCE_S, filled
from weightwire.transfer.errors import FencedError, SourceStalledError
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.framing import Frame, Part
from weightwire.transfer.wire.held import Held


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class Receiving:
    """Empty shells of a model of chunks of 8 bytes, and what of the model has been written to them."""

    def __init__(self, origin: Shells) -> None:
        manifest = origin.seal()
        self.clock = Clock()
        self.shells = Shells.allocate(manifest)
        self.shells.fill(0xAB)
        self.held = Held(self.shells, manifest, clock=self.clock)
        self._origin = origin

    def write(self, begin: int, end: int, *, flip: bool = False) -> list[tuple[Region, int, int]]:
        """Receive a run; returns what a stream would say that it is."""
        return self.write_region(Region(offset=begin, shape=(end - begin,), strides=(1,)), flip=flip)

    def write_region(self, region: Region, *, flip: bool = False) -> list[tuple[Region, int, int]]:
        packed = bytearray(b"".join(self._origin.gather(region)))
        packed[0] ^= flip
        self.shells.scatter(memoryview(packed), region, 0)
        return [(region, 0, region.numel)]

    def add(self, places: list[tuple[Region, int, int]], *chunks: int) -> None:
        self.held.add(self.held.manifest.digest, places, chunks)

    def has(self, begin: int, end: int) -> bool:
        return self.held.wait_for(begin, end, 0)


@pytest.fixture
def receiving() -> Receiving:
    """40 bytes: a storage of three chunks, and two small ones that share a fourth and a fifth."""
    tensors = {"a": filled("float32", (6,)), "b": filled("uint8", (4,)), "c": filled("uint8", (4,))}
    return Receiving(Shells.from_tensors(tensors | {"d": filled("int16", (4,))}, chunk_bytes=8))


def test_whole_chunk_counts_at_once(receiving: Receiving) -> None:
    receiving.add(receiving.write(8, 16), 1)
    assert receiving.has(8, 16)
    assert receiving.has(9, 12)
    assert not receiving.has(7, 16)
    assert not receiving.has(8, 17)


def test_pieces_count_once_they_make_a_chunk_of_the_origin(receiving: Receiving) -> None:
    receiving.add(receiving.write(24, 28))
    assert not receiving.has(24, 28)
    receiving.add(receiving.write(28, 32))
    assert receiving.has(24, 32)


def test_pieces_that_hash_to_something_else_never_count(receiving: Receiving) -> None:
    receiving.add(receiving.write(24, 28, flip=True))
    receiving.add(receiving.write(28, 32))
    assert not receiving.has(28, 32)
    receiving.add(receiving.write(24, 28))
    assert receiving.has(24, 32)


def test_chunk_of_the_source_that_lies_elsewhere_here_is_looked_at_again(receiving: Receiving) -> None:
    receiving.add(receiving.write(8, 16), 0)
    assert not receiving.has(0, 8)
    assert receiving.has(8, 16)


def test_chunk_of_another_manifest_proves_nothing(receiving: Receiving) -> None:
    places = receiving.write(8, 16, flip=True)
    receiving.held.add("0" * 64, places, [1])
    assert not receiving.has(8, 16)
    receiving.held.add("0" * 64, receiving.write(0, 8), [1])
    assert receiving.has(0, 8)


def test_strided_pieces_count_when_all_of_a_chunk_is_there(receiving: Receiving) -> None:
    columns = [Region(offset=offset, shape=(3, 4), strides=(8, 1)) for offset in (0, 4)]
    receiving.add(receiving.write_region(columns[0]))
    assert not receiving.has(0, 4)
    receiving.add(receiving.write_region(columns[1]))
    assert receiving.has(0, 24)


def test_frame_is_there_when_all_of_its_parts_are(receiving: Receiving) -> None:
    column = Region(offset=0, shape=(2, 2), strides=(8, 1))
    frame = Frame(parts=(Part(column, 0, 4), Part(Region(offset=24, shape=(4,), strides=(1,)), 0, 4)), nbytes=8)
    for chunk, begin in ((0, 0), (3, 24)):
        receiving.add(receiving.write(begin, begin + 8), chunk)
        assert not receiving.held.wait_for_frame(frame, 0)
    receiving.add(receiving.write(8, 16), 1)
    assert receiving.held.wait_for_frame(frame, 0)


def test_everything_is_there_once_it_is_complete(receiving: Receiving) -> None:
    assert not receiving.held.is_complete
    receiving.held.complete()
    assert receiving.has(0, 40)
    assert receiving.held.is_complete


def test_silence_is_borne_for_a_while_after_the_last_news(receiving: Receiving) -> None:
    receiving.clock.now += 9.5
    assert not receiving.has(0, 8)
    receiving.add(receiving.write(8, 16), 1)
    receiving.clock.now += 9.5
    assert not receiving.has(0, 8)
    receiving.clock.now += 0.5
    assert receiving.has(8, 16)
    with pytest.raises(SourceStalledError, match=r"nothing new has come for 10\.0 s"):
        receiving.has(0, 8)


def test_failure_ends_every_wait_and_leaves_what_is_there(receiving: Receiving) -> None:
    receiving.add(receiving.write(8, 16), 1)
    raised: list[Exception] = []

    def wait() -> None:
        try:
            receiving.held.wait_for(0, 8, PATIENCE_S)
        except FencedError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    reason = FencedError("over")
    receiving.held.fail(reason)
    waiting.join(PATIENCE_S)
    assert raised == [reason]
    assert receiving.has(8, 16)


def test_news_wake_who_waits_for_them(receiving: Receiving) -> None:
    came: list[bool] = []
    waiting = threading.Thread(target=lambda: came.append(receiving.held.wait_for(8, 16, PATIENCE_S)))
    waiting.start()
    receiving.add(receiving.write(8, 16), 1)
    waiting.join(PATIENCE_S)
    assert came == [True]


@given(st.data())
def test_only_whole_good_chunks_are_ever_there(data: st.DataObject) -> None:
    """Runs in any order and of any cut, some of them damaged: what is there is what the origin has."""
    origin = Shells.from_tensors({"a": torch.arange(30, dtype=torch.uint8), "b": filled("uint8", (5,))}, chunk_bytes=8)
    receiving = Receiving(origin)
    total = receiving.held.manifest.total_bytes
    good = bytearray(total)
    for _ in range(data.draw(st.integers(1, 8))):
        begin = data.draw(st.integers(0, total - 1))
        end = data.draw(st.integers(begin + 1, total))
        flip = data.draw(st.booleans())
        # Bytes that are verified are not written again.
        if any(receiving.has(at, at + 1) for at in range(begin, end)):
            continue
        pieces = [
            piece
            for low, high, _ in receiving.held.manifest.chunks_between(begin, end)
            for piece in receiving.write(low, high, flip=flip)
        ]
        receiving.add(pieces)
        good[begin:end] = bytes([not flip]) * (end - begin)
        if flip:
            good[begin:end] = bytes(end - begin)
    for low, high in pairwise(receiving.held.manifest.chunk_bounds):
        if receiving.has(low, high):
            assert b"".join(receiving.shells.views(low, high)) == b"".join(origin.views(low, high))
        else:
            assert not all(good[low:high])
