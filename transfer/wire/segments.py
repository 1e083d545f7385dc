"""What a plan wants of one source manifest, cut into segments, and segments cut again. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weightwire.transfer.manifest import Manifest
from weightwire.transfer.plan import Copy
from weightwire.transfer.regions import Region

# Segments are of this size, or smaller where there is less to share out: small enough that the streams finish
# together, large enough that a request's round trip does not show.
_PIECE_BYTES = 16 << 20
_PIECES_PER_STREAM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The unit of a claim: packed bytes of one source box, and where they go.

    Attributes:
        source: Flat region of the source, in bytes.
        target: Flat region of the target that the packed bytes belong to.
        begin: Position in `target`'s row-major order at which they begin.
        nbytes: How many.
    """

    source: Region
    target: Region
    begin: int
    nbytes: int


def cut_segments(manifest: Manifest, copies: Sequence[Copy], *, num_streams: int) -> Iterator[Segment]:
    """Cut copies into pieces for so many streams: at the manifest's chunk bounds, or where strided into boxes."""
    share = sum(copy.nbytes for copy in copies) // (_PIECES_PER_STREAM * num_streams)
    piece_bytes = min(max(share, manifest.chunk_bytes), _PIECE_BYTES)
    for copy in copies:
        if copy.source.is_contiguous:
            base = copy.source.offset
            for begin, end in _runs(manifest, base, base + copy.nbytes, piece_bytes):
                source = Region(offset=begin, shape=(end - begin,), strides=(1,))
                yield Segment(source=source, target=copy.target, begin=begin - base, nbytes=end - begin)
            continue
        for begin in range(0, copy.nbytes, piece_bytes):
            at = begin
            for box in copy.source.packed(begin, min(begin + piece_bytes, copy.nbytes)):
                yield Segment(source=box, target=copy.target, begin=at, nbytes=box.numel)
                at += box.numel


def _runs(manifest: Manifest, begin: int, end: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Flat bytes `begin` to `end` cut at the last chunk bound within each `piece_bytes`, or at the first one behind."""
    while begin < end:
        stop = min(end, _bound(manifest, begin, piece_bytes))
        yield begin, stop
        begin = stop


def _bound(manifest: Manifest, begin: int, nbytes: int) -> int:
    bounds = manifest.chunk_bounds
    at = bisect_right(bounds, begin + nbytes) - 1
    return bounds[at] if bounds[at] > begin else bounds[at + 1]


def cut_point(manifest: Manifest, segment: Segment, nbytes: int) -> int:
    """Where to cut a segment so that about `nbytes`, and no chunk in part, come before: at least one chunk does."""
    if segment.source.is_contiguous:
        return min(segment.nbytes, _bound(manifest, segment.source.offset, nbytes) - segment.source.offset)
    chunk = manifest.chunk_bytes
    return min(segment.nbytes, max(nbytes // chunk, 1) * chunk)


def part_of(segments: Iterable[Segment], begin: int, end: int) -> Iterator[Segment]:
    """Bytes `begin` to `end` of the packed stream of segments, as segments."""
    at = 0
    for segment in segments:
        low, high = max(begin - at, 0), min(end - at, segment.nbytes)
        at += segment.nbytes
        if low >= high:
            continue
        position = segment.begin + low
        for box in segment.source.packed(low, high):
            yield Segment(source=box, target=segment.target, begin=position, nbytes=box.numel)
            position += box.numel


def merged_regions(segments: Iterable[Segment]) -> Iterator[Region]:
    """The regions to ask for: contiguous segments that continue each other are one."""
    last: Region | None = None
    for segment in segments:
        region = segment.source
        if last is not None and last.is_contiguous and region.is_contiguous and last.end == region.offset:
            last = Region(offset=last.offset, shape=(last.numel + region.numel,), strides=(1,))
            continue
        if last is not None:
            yield last
        last = region
    if last is not None:
        yield last
