"""One pull from the four ranks of a TP4 source into a whole, over loopback, cut one way or the other.

    python -m benchmarks.strided pull rows|columns --mib N

Cut by rows (column-parallel layers) a rank's part is one run of the whole; cut by columns (row-parallel layers) it is a
box of strides, whose rows have to be scattered. All else is equal: sizes, processes, sockets and checksums. The clock
runs from the first request, after a warm-up on the same connections, to the last verified byte; then every byte is
compared.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks.plan_spec import Spec, rank_manifest
from weightwire.transfer.control import Control
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.planning import Supply, plan_pull
from weightwire.transfer.shells import Shells
from weightwire.transfer.tickets import Ticket, issue_ticket
from weightwire.transfer.wire.coverage import Coverage
from weightwire.transfer.wire.puller import Puller, PullOptions
from weightwire.transfer.wire.source import Access, Source, SourceIdentity
from weightwire.transfer.wire.source_server import SourceServer
from weightwire.transfer.wire.stream import Endpoint

MIB = 1 << 20
RANKS = 4
# As of a model with a hidden size of 4096: rows of 14336 elements, of which a rank holds runs of 7 KiB.
ROWS, COLUMNS, ITEMSIZE = 4096, 14336, 2
WARM_UP_BYTES = 64 * MIB


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("role", choices=["pull", "serve"])
    parser.add_argument("cut", choices=["rows", "columns"])
    parser.add_argument("--mib", type=int, default=448, help="bytes that are pulled, whole tensors (448)")
    parser.add_argument("--streams", type=int, default=2, help="connections to each rank (2)")
    options = parser.parse_args(arguments)
    # The threads that fill memory go on spinning for a while, on the cores that are measured.
    torch.set_num_threads(1)
    spec = specification(options.cut, options.mib)
    if options.role == "serve":
        serve(spec)
    else:
        print(json.dumps(pull(spec, options.cut, options.mib, streams=options.streams)))


def specification(cut: str, mib: int) -> Spec:
    count = max(1, mib * MIB // (ROWS * COLUMNS * ITEMSIZE))
    split = 0 if cut == "rows" else 1
    tensors = [{"name": f"layers.{i}.weight", "shape": [ROWS, COLUMNS], "split": split} for i in range(count)]
    found: Spec = json.loads(json.dumps({"source_tp": RANKS, "target_tp": 1, "itemsize": ITEMSIZE, "tensors": tensors}))
    return found


def content(number: int) -> torch.Tensor:
    """A whole tensor, the same in every process; no two of its rows are equal."""
    values = torch.arange(ROWS * COLUMNS, dtype=torch.int32).mul_(2654435761 - (1 << 32)).add_(number)
    return values.bitwise_right_shift_(8).to(torch.int16).view(torch.bfloat16).view(ROWS, COLUMNS)


def part(whole: torch.Tensor, split: int | None, rank: int) -> torch.Tensor:
    return whole if split is None else whole.chunk(RANKS, split)[rank]


# -- the source --


def serve(spec: Spec) -> None:
    key = bytes.fromhex(sys.stdin.readline().strip())
    ranks = Source.of_ranks(SourceIdentity(instance_id="bench"), range(RANKS))
    shells = {rank: Shells.allocate(rank_manifest(spec, rank, RANKS)) for rank in ranks}
    for number, tensor in enumerate(spec["tensors"]):
        whole = content(number)
        for rank, held in shells.items():
            held.tensor(tensor["name"]).copy_(part(whole, tensor["split"], rank))
    for rank, source in ranks.items():
        shells[rank].seal()
        source.grant_access(Access(ticket_key=key))
        source.publish(shells[rank], weight_version=1)
    with SourceServer(ranks) as server:
        print(json.dumps({"url": server.url, "generation": ranks[0].identity.generation}))
        for held in shells.values():
            print(held.manifest.text.decode())
        sys.stdout.flush()
        sys.stdin.read()


@contextmanager
def source_process(cut: str, mib: int) -> Iterator[tuple[list[Endpoint], list[Manifest]]]:
    """The source's ranks in a process of their own, which ends with the block."""
    key = secrets.token_bytes(32)
    command = [sys.executable, "-m", "benchmarks.strided", "serve", cut, "--mib", str(mib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(key.hex() + "\n")
        process.stdin.flush()
        ready = json.loads(process.stdout.readline())
        manifests = [Manifest.from_text(process.stdout.readline().rstrip("\n").encode()) for _ in range(RANKS)]
        yield [endpoint(ready["url"], ready["generation"], manifest, key) for manifest in manifests], manifests
        process.stdin.close()


def endpoint(url: str, generation: int, manifest: Manifest, key: bytes) -> Endpoint:
    ticket = Ticket(
        transfer_id="bench",
        source_instance="bench",
        source_rank=manifest.rank,
        source_generation=generation,
        target_instance="bench-target",
        target_rank=0,
        weight_version=1,
        expires_at=time.time() + 3600,
    )
    return Endpoint(
        instance_id="bench",
        rank=manifest.rank,
        generation=generation,
        weight_version=1,
        url=url,
        manifest=manifest.digest,
        ticket=issue_ticket(key, ticket),
        target_instance="bench-target",
    )


# -- the target --


def pull(spec: Spec, cut: str, mib: int, *, streams: int) -> dict[str, float]:
    shells = Shells.allocate(rank_manifest(spec, 0, 1))
    shells.fill(1)
    control = Control(deadline_s=300)
    with source_process(cut, mib) as (endpoints, manifests):
        plan = plan_pull(shells.manifest, manifests)
        strided = sum(not copy.is_contiguous for found in plan.copies for copy in found)
        by_digest = {manifest.digest: manifest for manifest in manifests}
        with Puller(shells, endpoints, by_digest, PullOptions(streams=streams)) as puller:
            puller.connect(plan)
            rest = IntervalSet([(WARM_UP_BYTES, max(WARM_UP_BYTES, shells.manifest.total_bytes))])
            puller.pull(plan_pull(shells.manifest, manifests, Supply(covered=rest)), control)
            shells.fill(1)
            puller.coverage = Coverage()
            began = time.perf_counter()
            puller.pull(plan, control)
            seconds = time.perf_counter() - began
            if puller.failures or puller.coverage.target.total != shells.manifest.total_bytes:
                raise SystemExit(f"not all came: {puller.failures}")
    for number, tensor in enumerate(spec["tensors"]):
        if not shells.tensor(tensor["name"]).view(torch.int16).equal(content(number).view(torch.int16)):
            raise SystemExit(f"{tensor['name']}: differs from what the source made")
    return {"seconds": seconds, "bytes": shells.manifest.total_bytes, "strided_copies": strided}


if __name__ == "__main__":
    main(sys.argv[1:])
