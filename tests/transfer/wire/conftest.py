"""What a source has to answer, written from docs/protocol.md without the code of a source."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import xxhash

from tests.transfer.conftest import PATIENCE_S, Fake, MakeFake, Serve, Served, filled, read_request
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.planning import plan_pull
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.framing import ReadRequest, cut_frames
from weightwire.transfer.wire.segments import Segment, cut_segments

MEDIA_TYPE = "application/vnd.weightwire.frames"
POISON = 0xAB


def data(payload: bytes, *, digest: int | None = None, trailer: bytes = b"GOOD") -> bytes:
    """One DATA frame."""
    actual = xxhash.xxh3_64_intdigest(payload) if digest is None else digest
    return b"DATA" + struct.pack("!I", len(payload)) + payload + trailer + struct.pack("!Q", actual)


def fail(problem: bytes) -> bytes:
    return b"FAIL" + struct.pack("!I", len(problem)) + problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The right answer to one request, to be sent or to be spoiled first.

    Attributes:
        headers: By name.
        payloads: One for each frame.
    """

    headers: dict[str, str]
    payloads: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(map(data, self.payloads))

    def text(self, body: bytes | None = None, *, status: str = "200 OK", **changes: str | None) -> bytes:
        """Head and body; headers are changed by name with `_` for `-`, or left out where None."""
        body = self.body if body is None else body
        named = {name.replace("_", "-").lower(): value for name, value in changes.items()}
        headers = {name.lower(): value for name, value in self.headers.items()} | {"content-length": str(len(body))}
        lines = [f"{name}: {value}" for name, value in (headers | named).items() if value is not None]
        return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1") + body


def answer_to(raw: bytes, shells: Shells) -> Answer:
    """What a source of these shells has to answer to a read request."""
    request = ReadRequest.from_bytes(raw)
    frames = cut_frames(shells.manifest, request.regions)
    return Answer(
        headers={
            "Content-Type": MEDIA_TYPE,
            "Weightwire-Generation": str(request.generation),
            "Weightwire-Weight-Version": str(request.weight_version),
            "Weightwire-Manifest": request.manifest,
            "Weightwire-Request": xxhash.xxh3_64_hexdigest(raw),
        },
        payloads=[b"".join(view for part in frame.parts for view in shells.gather(*part)) for frame in frames],
    )


class Closed(bytes):
    """Bytes after which the server closes the connection."""


class Held(bytes):
    """Bytes after which the server says nothing more, and leaves the connection open."""


Spoil = Callable[[Answer], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Shells that a source holds, and the segments that empty shells of the same layout want."""

    shells: Shells
    manifest: Manifest

    def target(self) -> Shells:
        target = Shells.allocate(self.manifest)
        target.fill(POISON)
        return target

    def segments(self) -> list[Segment]:
        (copies,) = plan_pull(self.manifest, [self.manifest]).copies
        return list(cut_segments(self.manifest, copies, num_streams=1))

    @property
    def memory(self) -> bytes:
        return b"".join(self.shells.views(0, self.manifest.total_bytes))


@pytest.fixture
def model() -> Model:
    """Three chunks of 16 bytes of one storage, and one of 8 with a hole before its neighbour."""
    tensors = {"a": filled("float32", (12,)), "b": filled("uint8", (4,)), "none": torch.empty(0)}
    shells = Shells.from_tensors(tensors | {"c": filled("int16", (2,))}, chunk_bytes=16)
    return Model(shells=shells, manifest=shells.seal())


@pytest.fixture
def served(serve: Serve, model: Model) -> Served:
    """A real source of the model."""
    return serve(model.shells)


Answering = Callable[..., Fake]


@pytest.fixture
def answering(fake: MakeFake, model: Model) -> Answering:
    """Makes a server of the model that spoils its answers, one after the other, and the last way for ever."""

    def make(*spoils: Spoil, of: Model | None = None) -> Fake:
        left = list(spoils)
        held = of or model

        def converse(connection: socket.socket) -> None:
            while body := read_request(connection)[1]:
                server.requests.append(body)
                spoil = left.pop(0) if len(left) > 1 else left[0]
                raw = spoil(answer_to(body, held.shells))
                connection.sendall(raw)
                if isinstance(raw, Held):
                    server.over.wait(PATIENCE_S)
                if isinstance(raw, (Closed, Held)):
                    return

        server = fake(converse)
        return server

    return make
