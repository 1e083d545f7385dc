"""Plans the layouts of a planner benchmark's specification: the adapter between its `--ours` and this project.

    python -m benchmarks.plan_spec SPEC.json

The specification names tensors with the dimension that each is cut along, and how many ranks cut it on both sides. Each
rank's part becomes a manifest. One JSON line is printed: `segments` are the copies of all target ranks, `bytes` what
arrives, and `seconds` covers both parsed layouts to the finished plans of all targets, and neither the reading of the
specification nor the making of the manifests.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from weightwire.transfer.layouts import ModelIdentity, plain_fingerprint
from weightwire.transfer.manifest import CheckpointSpec, Manifest, TensorEntry, Topology
from weightwire.transfer.placement import PlacedPiece
from weightwire.transfer.planning import Planner
from weightwire.transfer.regions import Region, row_major


class Tensor(TypedDict):
    """One tensor of the specification; `split` is the dimension that is cut, or null for a copy on every rank."""

    name: str
    shape: list[int]
    split: int | None


class Spec(TypedDict):
    """The specification."""

    source_tp: int
    target_tp: int
    itemsize: int
    tensors: list[Tensor]


def main(path: Path) -> None:
    spec: Spec = json.loads(path.read_text())
    sources = [rank_manifest(spec, rank, spec["source_tp"]) for rank in range(spec["source_tp"])]
    targets = [rank_manifest(spec, rank, spec["target_tp"]) for rank in range(spec["target_tp"])]
    began = time.perf_counter()
    planner = Planner(sources)
    plans = planner.plan_all(targets)
    seconds = time.perf_counter() - began
    if left := [piece for plan in plans for piece in plan.disk]:
        raise SystemExit(f"{len(left)} pieces have no source; the first is {left[0]}")
    copies = [copy for plan in plans for found in plan.copies for copy in found]
    figures = {"seconds": seconds, "segments": len(copies), "bytes": sum(copy.nbytes for copy in copies)}
    print(json.dumps(figures))


def rank_manifest(spec: Spec, rank: int, ranks: int) -> Manifest:
    """Each tensor's part of one rank, in a storage of its own."""
    dtype = {1: "uint8", 2: "bfloat16", 4: "float32"}[spec["itemsize"]]
    specs, entries = [], []
    for number, tensor in enumerate(spec["tensors"]):
        shape, split = tuple(tensor["shape"]), tensor["split"]
        specs.append(CheckpointSpec(name=tensor["name"], dtype=dtype, shape=shape))
        part, offset = shape, 0
        if split is not None:
            part = (*shape[:split], shape[split] // ranks, *shape[split + 1 :])
            offset = rank * part[split] * math.prod(shape[split + 1 :])
        entries.append(entry(tensor["name"], dtype, Region(offset=offset, shape=part, strides=strides(shape)), number))
    identity = ModelIdentity(model="spec", checkpoint=tuple(specs), topology=Topology(tp=ranks), rank=rank)
    return identity.manifest((item.nbytes for item in entries), entries)


def entry(name: str, dtype: str, box: Region, storage: int) -> TensorEntry:
    """A tensor that is a box of the checkpoint's, row-major."""
    here = row_major(box.shape)
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=here.shape,
        strides=here.strides,
        storage=storage,
        offset=0,
        layout=plain_fingerprint(dtype, here.shape, here.strides),
        placement=(PlacedPiece.of(name, checkpoint=box, runtime=here),),
    )


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    return row_major(tuple(shape)).strides


if __name__ == "__main__":
    main(Path(sys.argv[1]))
