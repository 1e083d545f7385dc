"""Pulls of everything that a list of endpoints offers, and ways to spoil the answers of a source."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import torch

from tests.transfer.conftest import PATIENCE_S, Fake, MakeFake, endpoint_of, read_request
from tests.transfer.wire.conftest import POISON, Answer, Closed, Model, Spoil, answer_to, data
from weightwire.transfer.control import Control
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.plan import Plan
from weightwire.transfer.planning import Supply, plan_pull
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.framing import ReadRequest
from weightwire.transfer.wire.puller import Puller, PullOptions
from weightwire.transfer.wire.stream import Endpoint, Timeouts

LONG = Timeouts(connect_s=PATIENCE_S, stall_s=PATIENCE_S)
CHUNK = 16


def good(answer: Answer) -> bytes:
    return answer.text()


def model_of(tensors: dict[str, torch.Tensor], *, chunk_bytes: int = CHUNK) -> Model:
    shells = Shells.from_tensors(tensors, chunk_bytes=chunk_bytes)
    return Model(shells=shells, manifest=shells.seal())


def planned(target: Shells, puller: Puller, covered: IntervalSet | None = None) -> Plan:
    """What is left to be fetched from the sources that were not given up."""
    covered = puller.coverage.target if covered is None else covered
    supply = Supply(lost=puller.lost, capacities=puller.capacities, rates=puller.rates, covered=covered)
    return plan_pull(target.manifest, puller.manifests, supply)


class Pull:
    """One pull of everything that a list of endpoints offers, into poisoned shells."""

    def __init__(
        self,
        endpoints: list[Endpoint],
        models: list[Model],
        *,
        target: Shells | None = None,
        streams: int = 2,
        timeouts: Timeouts = LONG,
        busy_patience_s: float = 30.0,
        stall_window_s: float = PATIENCE_S,
        deadline_s: float = PATIENCE_S,
        options: PullOptions | None = None,
        has_spare: bool = False,
    ) -> None:
        self.manifests = {model.manifest.digest: model.manifest for model in models}
        self.target = target or Shells.allocate(models[0].manifest)
        self.target.fill(POISON)
        self.control = Control(deadline_s=deadline_s)
        self.told: list[int] = []
        made = PullOptions(
            streams=streams, timeouts=timeouts, busy_patience_s=busy_patience_s, stall_window_s=stall_window_s
        )
        self.early_ends = 0
        self.failed: list[str] = []
        self.puller = Puller(
            self.target,
            endpoints,
            self.manifests,
            options or made,
            has_spare=has_spare,
            on_failure=lambda failure: self.failed.append(failure.instance_id),
        )

    def run(self, on_bytes: Callable[[int], None] | None = None) -> Pull:
        """Connect, and pull until nobody has anything more to give."""
        with self.puller as puller:
            while any((plan := planned(self.target, puller)).copies):
                puller.connect(plan)
                self.early_ends += puller.pull(plan, self.control, on_bytes or self.told.append)
        return self

    @property
    def is_complete(self) -> bool:
        """True if all is covered; what is covered has been compared by then."""
        return self.puller.coverage.target.covers(0, self.target.manifest.total_bytes)

    @property
    def codes(self) -> dict[str, str]:
        return {failure.instance_id: failure.code for failure in self.puller.failures}

    @property
    def given(self) -> dict[str, int]:
        return {instance_id: nbytes for (instance_id, _), nbytes in self.puller.coverage.bytes_by_source.items()}

    def check(self, model: Model) -> None:
        """Every covered byte is right, and every other one was at most written by an unverified chunk."""
        memory = b"".join(self.target.views(0, self.target.manifest.total_bytes))
        for begin, end in self.puller.coverage.target:
            assert memory[begin:end] == model.memory[begin:end]
        assert sum(self.given.values()) == self.puller.coverage.target.total


def endpoint(model: Model, server: Fake, name: str = "s") -> Endpoint:
    return endpoint_of(model.manifest, url=server.url, instance_id=name)


def asked(server: Fake) -> list[list[tuple[int, int]]]:
    """The flat intervals of each request."""
    requests = [ReadRequest.from_bytes(raw).regions for raw in server.requests]
    return [[(region.offset, region.end) for region in regions] for regions in requests]


def cut(frames: int) -> Spoil:
    """Answers with some frames and a half, and closes the connection."""

    def spoil(answer: Answer) -> bytes:
        return Closed(answer.text(answer.body[: frames * (CHUNK + 20) + 12], content_length=str(len(answer.body))))

    return spoil


def flip(answer: Answer) -> bytes:
    body = bytearray(answer.body)
    body[10] ^= 4
    return answer.text(bytes(body))


def paced(make: MakeFake, model: Model, *, frames_per_s: float) -> Fake:
    """A server that sends so many frames a second, over all its connections together."""
    turn = threading.Lock()

    def converse(connection: socket.socket) -> None:
        while body := read_request(connection)[1]:
            server.requests.append(body)
            answer = answer_to(body, model.shells)
            connection.sendall(answer.text()[: -len(answer.body)])
            for payload in answer.payloads:
                with turn:
                    server.over.wait(1 / frames_per_s)
                connection.sendall(data(payload))

    server = make(converse)
    return server
