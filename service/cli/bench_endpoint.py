"""Source processes of a bench, as a target sees them: no service in between, tickets signed here."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from weightwire.service.cli.bench_link import LinkFaults
from weightwire.service.cli.bench_source import TARGET
from weightwire.service.cli.bench_worker import Worker
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.tickets import Ticket, issue_ticket
from weightwire.transfer.wire.stream import Endpoint

_MODULE = "weightwire.service.cli.bench_source"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSource:
    """A source process.

    Attributes:
        endpoint: Where it is read.
        manifest: What it holds.
        worker: To end or to stop it by.
    """

    endpoint: Endpoint
    manifest: Manifest
    worker: Worker


@contextlib.contextmanager
def open_sources(*faults: LinkFaults | None, nbytes: int, tensors: int) -> Iterator[list[BenchSource]]:
    """Sources with the same synthetic weights, which end with the block.

    Args:
        faults: For each source, those of the link that stands before it; None is no link.
        nbytes: Of each.
        tensors: That it is cut into.

    Raises:
        SourceUnreachableError: If one does not start.
    """
    key = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        workers = []
        for number, fault in enumerate(faults):
            link = () if fault is None else (fault.to_text(),)
            command = [sys.executable, "-m", _MODULE, str(nbytes), str(tensors), *link]
            worker = stack.enter_context(Worker(f"source {number}", command))
            worker.tell(key.hex())
            workers.append(worker)
        yield [_described(worker, key) for worker in workers]


def _described(worker: Worker, key: bytes) -> BenchSource:
    said = worker.hear()
    manifest = Manifest.from_text(str(said["text"]).encode(), digest=str(said["manifest"]))
    generation = said["generation"]
    assert isinstance(generation, int)
    ticket = Ticket(
        transfer_id="bench",
        source_instance="bench",
        source_rank=0,
        source_generation=generation,
        target_instance=TARGET,
        target_rank=0,
        weight_version=1,
        expires_at=time.time() + 3600,
    )
    endpoint = Endpoint(
        instance_id=worker.name,
        rank=0,
        generation=generation,
        weight_version=1,
        url=str(said["url"]),
        manifest=manifest.digest,
        ticket=issue_ticket(key, ticket),
        target_instance=TARGET,
    )
    return BenchSource(endpoint=endpoint, manifest=manifest, worker=worker)
