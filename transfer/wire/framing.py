"""The body of a `POST /v1/read`: what is asked for, and how the answer is cut into checksummed frames.

    body  := frame*
    frame := "DATA" length:u32  payload[length]  ("GOOD" | "VOID") xxh3_64:u64
           | "WAIT" length:u32
           | "FAIL" length:u32  problem document[length]

Integers are big-endian. docs/protocol.md is the specification; this module and it are tested against each other.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from weightwire.transfer.errors import RegionError, RequestError
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.regions import Region

MEDIA_TYPE = "application/vnd.weightwire.frames"
PROTOCOL = "1.1"

HEADER = struct.Struct("!4sI")
TRAILER = struct.Struct("!4sQ")
# A trailer and the header behind it.
TAIL = struct.Struct("!4sQ4sI")
DATA, FAIL, WAIT, GOOD, VOID = b"DATA", b"FAIL", b"WAIT", b"GOOD", b"VOID"
WAIT_HEADER = HEADER.pack(WAIT, 0)
# A source that has to wait says so at least as often as this.
WAIT_INTERVAL_S = 0.5
FRAME_OVERHEAD_BYTES = HEADER.size + TRAILER.size
MAX_PROBLEM_BYTES = 1 << 16
MAX_REQUEST_BYTES = 1 << 22
# Enough for ten seconds before each frame; of many frames few have to be waited for so long.
_WAITS_PER_FRAME = 21
MAX_WAITS = 1 << 12
_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """What one `POST /v1/read` asks for.

    Attributes:
        generation: Of the source process; another one answers 409.
        weight_version: Of the weights; another one answers 409.
        manifest: Digest of the manifest that `regions` are meant in.
        target_instance: Who reads; must be the ticket's.
        target_rank: Who reads; must be the ticket's.
        regions: Flat regions, in bytes, in the order in which their bytes are to come.
    """

    generation: int
    weight_version: int
    manifest: str
    target_instance: str
    target_rank: int
    regions: tuple[Region, ...]

    def to_bytes(self) -> bytes:
        return json.dumps(
            {
                "generation": self.generation,
                "weight_version": self.weight_version,
                "manifest": self.manifest,
                "target": {"instance_id": self.target_instance, "rank": self.target_rank},
                "regions": [_region_to_json(region) for region in self.regions],
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> ReadRequest:
        """Parse a request's body.

        Raises:
            RequestError: If it is not one, or has fields that are not known.
            RegionError: If a region makes no sense.
        """
        try:
            match json.loads(raw):
                case {
                    "generation": int(generation),
                    "weight_version": int(weight_version),
                    "manifest": str(manifest),
                    "target": {"instance_id": str(instance_id), "rank": int(rank), **unknown_of_target},
                    "regions": [*regions],
                    **unknown,
                } if not unknown and not unknown_of_target and _are_integers(generation, weight_version, rank):
                    return cls(
                        generation=generation,
                        weight_version=weight_version,
                        manifest=manifest,
                        target_instance=instance_id,
                        target_rank=rank,
                        regions=tuple(_region_from_json(region) for region in regions),
                    )
        except (ValueError, RecursionError) as error:
            raise RequestError(f"read request: not JSON: {error}") from error
        raise RequestError(
            "read request: expected exactly the fields generation, weight_version, manifest, "
            "target {instance_id, rank} and regions"
        )


def check_extent(manifest: Manifest, request: ReadRequest) -> None:
    """Check that no more is asked for than there is, since an answer is cut into frames before it is sent.

    Raises:
        RegionError: If the regions have more bytes, together, than the flat space, and than all tensors: where the
            source ties tensors and the target does not, the same bytes are asked for once for each.
    """
    wanted = sum(region.numel for region in request.regions)
    if wanted > manifest.total_bytes and wanted > sum(tensor.nbytes for tensor in manifest.tensors):
        raise RegionError(f"read request: asks for {wanted} bytes of a flat space of {manifest.total_bytes}")


def understands_waits(spoken: str | None) -> bool:
    """Whether a reader that states this version skips WAIT headers; one that states none is not taken to."""
    version = _VERSION.fullmatch((spoken or "").strip())
    return version is not None and (int(version[1]), int(version[2])) >= (1, 1)


def wait_room(num_frames: int) -> int:
    """For how many WAIT headers an answer of so many frames keeps room, since its length is stated before it begins."""
    return min(num_frames * _WAITS_PER_FRAME, MAX_WAITS)


class Part(NamedTuple):
    """Bytes `begin` to `end` of a region, in its row-major order."""

    region: Region
    begin: int
    end: int


class Frame(NamedTuple):
    """The payload of one DATA frame.

    Attributes:
        parts: What it carries, in order.
        nbytes: Their sum, 1 to `chunk_bytes`.
        chunk: Number of the manifest's chunk that the payload is, if it is exactly one.
    """

    parts: tuple[Part, ...]
    nbytes: int
    chunk: int | None = None


def cut_frames(manifest: Manifest, regions: Iterable[Region]) -> Iterator[Frame]:
    """Cut the packed bytes of `regions` into frames.

    A whole chunk of the manifest travels as a frame of its own, so that its digest is the manifest's; whatever lies
    between whole chunks is packed into frames of up to `chunk_bytes`.

    Raises:
        RegionError: If a region reaches outside the manifest, or a strided one outside its storage.
    """
    loose: list[Part] = []
    size = 0
    for part, chunk in _parts(manifest, regions):
        if chunk is None and size + part.end - part.begin <= manifest.chunk_bytes:
            loose.append(part)
            size += part.end - part.begin
            continue
        if loose:
            yield Frame(parts=tuple(loose), nbytes=size)
            loose, size = [], 0
        if chunk is not None:
            yield Frame(parts=(part,), nbytes=part.end - part.begin, chunk=chunk)
        else:
            loose, size = [part], part.end - part.begin
    if loose:
        yield Frame(parts=tuple(loose), nbytes=size)


def _parts(manifest: Manifest, regions: Iterable[Region]) -> Iterator[tuple[Part, int | None]]:
    """The regions cut at chunk bounds, or every `chunk_bytes` where strided, with the chunk that a part is."""
    for region in regions:
        if region.end > manifest.total_bytes:
            raise RegionError(
                f"region {region.to_json()}: ends at byte {region.end} of a flat space of {manifest.total_bytes}"
            )
        if region.is_contiguous:
            for begin, end, chunk in manifest.chunks_between(region.offset, region.offset + region.numel):
                yield Part(region=region, begin=begin - region.offset, end=end - region.offset), chunk
            continue
        if region.numel and manifest.storage_at(region.offset) != manifest.storage_at(region.end - 1):
            raise RegionError(f"region {region.to_json()}: a strided region has to stay inside one storage")
        for begin in range(0, region.numel, manifest.chunk_bytes):
            yield Part(region=region, begin=begin, end=min(begin + manifest.chunk_bytes, region.numel)), None


def _are_integers(*values: int) -> bool:
    # A JSON true is an int to a pattern.
    return all(type(value) is int for value in values)


def _region_to_json(region: Region) -> list[object]:
    if region.is_contiguous:
        return [region.offset, region.numel]
    return region.to_json()


def _region_from_json(value: object) -> Region:
    match value:
        case [int(offset), int(nbytes)] if _are_integers(offset, nbytes):
            return Region(offset=offset, shape=(nbytes,), strides=(1,))
    # With as few dimensions as possible: a reader may write thousands of size 1, and each would cost a call.
    return Region.from_json(value).coalesced()
