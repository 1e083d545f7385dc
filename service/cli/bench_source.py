"""The source process of `weightwire bench`: makes synthetic weights and serves them until its stdin ends.

Arguments: bytes, tensors, and faults of a link before it, if there is to be one.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

import torch

from weightwire.service.cli.bench_link import FaultyLink, LinkFaults
from weightwire.service.cli.output import print_json
from weightwire.transfer.layouts import ModelIdentity, plain_layout
from weightwire.transfer.manifest import CheckpointSpec, Manifest
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.source import Access, Source, SourceIdentity
from weightwire.transfer.wire.source_server import SourceServer

TARGET = "bench-target"

# Source: Knuth, The Art of Computer Programming, vol. 3, 6.4: 2^64 / golden ratio spreads counters over all bits.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)


def synthetic_layout(nbytes: int, tensors: int) -> Manifest:
    """So many int64 tensors, as equal as eight-byte elements allow."""
    words = nbytes // 8
    bounds = [words * i // tensors for i in range(tensors + 1)]
    specs = (
        CheckpointSpec(name=f"tensor.{i}", dtype="int64", shape=(bounds[i + 1] - bounds[i],)) for i in range(tensors)
    )
    return plain_layout(specs, ModelIdentity(model="bench"))


def synthetic_tensors(layout: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors' contents, the same in every process: no two words of a transfer are equal."""
    first = 0
    for entry in layout.tensors:
        (words,) = entry.shape
        yield entry.name, torch.arange(first, first + words).mul_(_SPREAD)
        first += words


def main() -> None:
    gc.freeze()
    nbytes, tensors = map(int, sys.argv[1:3])
    key = bytes.fromhex(sys.stdin.readline().strip())
    shells = Shells.allocate(synthetic_layout(nbytes, tensors))
    for name, content in synthetic_tensors(shells.manifest):
        shells.tensor(name).copy_(content)
    manifest = shells.seal()
    source = Source(SourceIdentity(instance_id="bench"))
    source.grant_access(Access(ticket_key=key))
    source.publish(shells, weight_version=1)
    with SourceServer(source) as server, contextlib.ExitStack() as stack:
        url = server.url
        for faults in map(LinkFaults.from_text, sys.argv[3:]):
            url = stack.enter_context(FaultyLink(faults, upstream_port=server.address.port)).url
        generation = source.identity.generation
        text = manifest.text.decode()
        print_json({"url": url, "generation": generation, "manifest": manifest.digest, "text": text})
        sys.stdin.read()


if __name__ == "__main__":
    main()
