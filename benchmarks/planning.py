"""What plans between topologies cost: seconds, memory and manifests, and how they grow; and strided pulls.

    python -m benchmarks.planning [--rounds N] [--only dense rivals experts growth strided] [--json FILE]

Every measurement is a process of its own. A cell shows the median, and the least and the most in brackets. Environment:
PEERS_KIT, the folder of the peer benchmark kit with the planners of others, by default the one beside the project;
PEERS_DIR, where the kit's environments are or are to be made.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.manifest import Manifest, Topology, chunk_bounds
from weightwire.transfer.models import parse_config
from weightwire.transfer.models.expected_specs import expected_specs
from weightwire.transfer.planning import Planner, plan_pull
from weightwire.transfer.topology_plan import Side, trace_rank

MIB = 1 << 20
LLAMA_70B: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
# As published: 128 experts in each of 94 layers, 36,945 tensors.
QWEN3_MOE_235B: Mapping[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
EXPERT_PAIRS = {
    "TP8 -> TP16": (Topology(tp=8), Topology(tp=16)),
    "TP8/EP8 -> TP16/EP16": (Topology(tp=8, ep=8), Topology(tp=16, ep=16)),
}
# Of 16: the ends and two between.
PLANNED_RANKS = (0, 5, 10, 15)
LAYERS = (5, 10, 20, 40, 80)
SOURCE_RANKS = (4, 8, 16, 32, 64)
# The kit's slowest planner takes half a minute.
RIVAL_ROUNDS = 3

# What one process says on its standard output.
Figures: TypeAlias = Mapping[str, list[float]]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case (5)")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    found = {}
    for name in options.only:
        print(f"\n{name}: load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        found[name] = SECTIONS[name](options.rounds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


# -- sections --


def dense(rounds: int) -> object:
    """All four target ranks, planned with one planner, and each as if it were alone."""
    turns = [measured("dense") for _ in range(rounds)]
    for what in ("together", "apart"):
        print(f"Llama-70B TP8 -> TP4, four ranks {what:9} {seconds(turn[what][0] for turn in turns)}")
    print(f"{'':33} {turns[0]['copies'][0]:.0f} copies, {turns[0]['bytes'][0] / 1e9:.1f} GB")
    return turns


def rivals(rounds: int) -> object:
    """The kit's planners and this one, each with the kit's own layouts, in one run after the other."""
    kit = Path(os.environ.get("PEERS_KIT", "../shared/peers"))
    if not (kit / "bench_planner.py").is_file():
        print(f"skipped: the planners of others, since there is no peer benchmark kit at {kit}")
        return None
    peers = Path(os.environ.get("PEERS_DIR", ".cache/peers"))
    if not (peers / "planner" / "bin" / "python").exists():
        subprocess.run(["bash", str(kit / "setup.sh"), str(peers)], check=False, stdout=sys.stderr)
    ours = f"{shlex.quote(sys.executable)} -m benchmarks.plan_spec {{spec}}"
    turns = []
    for _ in range(min(rounds, RIVAL_ROUNDS)):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, str(kit / "bench_planner.py"), "--peers-dir", str(peers), "--ours", ours]
            subprocess.run([*command, "--json", file.name], check=True, stdout=subprocess.DEVNULL)
            turns.append(json.loads(Path(file.name).read_text())["results"])
    for name, row in turns[0].items():
        if "error" in row:
            print(f"{name:16} {row['error']}")
        else:
            print(f"{name:16} {seconds(turn[name]['seconds'] for turn in turns)} {row['segments']:10} segments")
    return turns


def experts(_rounds: int) -> object:
    """Each pair once; the spread is that over ranks."""
    found = {}
    for pair in EXPERT_PAIRS:
        turn = found[pair] = measured("experts", pair)
        print(f"Qwen3-MoE-235B {pair}")
        print(f"  trace of a rank    {seconds(turn['trace'])}")
        print(f"  plan of a rank     {seconds(turn['plan'])}  {max(turn['copies']):.0f} copies at most")
        print(f"  manifest of a rank {spread(turn['gzip_bytes'], 1e6, 'MB')} with gzip -1, as it is published")
        print(f"  peak of the process that holds all of it: {turn['peak_bytes'][0] / MIB:.0f} MiB")
    return found


def growth(rounds: int) -> object:
    """Llama-70B with fewer layers, then from more source ranks."""
    cases = {
        "tensors": [(layers, 8, 4) for layers in LAYERS],
        "source ranks": [(LAYERS[2], ranks, 2) for ranks in SOURCE_RANKS],
    }
    found = {}
    for what, sizes in cases.items():
        turns = [measured("growth", *map(str, size), str(rounds)) for size in sizes]
        counts = [turn[what.replace(" ", "_")][0] for turn in turns]
        for count, turn in zip(counts, turns, strict=True):
            held = f"{turn['memory_bytes'][0] / MIB:8.1f} MiB"
            print(f"{count:6.0f} {what:12} {seconds(turn['plan'])} {held} {turn['copies'][0]:8.0f} copies")
        times = exponent(counts, [statistics.median(turn["plan"]) for turn in turns])
        memory = exponent(counts, [turn["memory_bytes"][0] for turn in turns])
        print(f"time grows as {what}^{times:.2f}, memory as {what}^{memory:.2f}")
        found[what] = {"sizes": counts, "turns": turns, "exponents": {"seconds": times, "memory": memory}}
    return found


def strided(rounds: int) -> object:
    """Both cuts in turns, each time with new processes."""
    turns: dict[str, list[dict[str, float]]] = {"rows": [], "columns": []}
    for _ in range(rounds):
        for cut, done in turns.items():
            done.append(json.loads(run_module("benchmarks.strided", "pull", cut)))
    for cut, done in turns.items():
        rates = [turn["bytes"] / turn["seconds"] for turn in done]
        strides = f"{done[0]['strided_copies']:.0f} strided copies"
        print(f"TP4 -> TP1, cut by {cut:8} {spread(rates, 1e9, 'GB/s')} {strides}")
    pairs = zip(turns["rows"], turns["columns"], strict=True)
    ratios = [row["seconds"] / column["seconds"] for row, column in pairs]
    print(f"strided is {spread(ratios, 1, 'times')} as fast as contiguous, turn by turn")
    return {"turns": turns, "ratios": ratios}


SECTIONS: Mapping[str, Callable[[int], object]] = {
    "dense": dense,
    "rivals": rivals,
    "experts": experts,
    "growth": growth,
    "strided": strided,
}


# -- measurements, each in its own process --


def measure(what: str, *arguments: str) -> Figures:
    if what == "dense":
        return measure_dense()
    if what == "experts":
        return measure_experts(*EXPERT_PAIRS[arguments[0]])
    layers, source, target, rounds = map(int, arguments)
    return measure_growth({**LLAMA_70B, "num_hidden_layers": layers}, Topology(tp=source), Topology(tp=target), rounds)


def measure_dense() -> Figures:
    identity = described(LLAMA_70B)
    sources, targets = rank_texts(identity, Topology(tp=8)), rank_texts(identity, Topology(tp=4))
    apart = []
    for text in targets:
        held, target = parsed(sources), Manifest.from_text(text)
        began = time.perf_counter()
        plan_pull(target, held)
        apart.append(time.perf_counter() - began)
    held, wanted = parsed(sources), parsed(targets)
    began = time.perf_counter()
    planner = Planner(held)
    plans = planner.plan_all(wanted)
    together = time.perf_counter() - began
    copies = [copy for plan in plans for found in plan.copies for copy in found]
    return {
        "together": [together],
        "apart": [sum(apart)],
        "copies": [len(copies)],
        "bytes": [sum(copy.nbytes for copy in copies)],
    }


def measure_experts(source: Topology, target: Topology) -> Figures:
    identity = described(QWEN3_MOE_235B)
    trace, plans = list[float](), list[float]()
    copies, sizes = list[float](), list[float]()
    sources: list[Manifest] = []
    for rank in range(source.world_size):
        traced = trace_rank(identity, Side(topology=source), rank)
        trace.append(traced.seconds)
        sources.append(traced.manifest)
    for rank in PLANNED_RANKS:
        traced = trace_rank(identity, Side(topology=target), rank)
        trace.append(traced.seconds)
        # Copies of the manifests, so that nothing is known of them yet: each rank plans by itself.
        held = [replace(manifest) for manifest in sources]
        began = time.perf_counter()
        plan = plan_pull(traced.manifest, held)
        plans.append(time.perf_counter() - began)
        copies.append(sum(map(len, plan.copies)))
        if plan.disk:
            raise SystemExit(f"rank {rank}: {len(plan.disk)} pieces have no source")
        del plan, held, traced
    # Linux counts the peak in kibibytes. Source: getrusage(2).
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for manifest in sources:
        sizes.append(len(gzip.compress(with_digests(manifest).text, compresslevel=1)))
    return {"trace": trace, "plan": plans, "copies": copies, "gzip_bytes": sizes, "peak_bytes": [peak]}


def measure_growth(config: Mapping[str, object], source: Topology, target: Topology, rounds: int) -> Figures:
    identity = described(config)
    sources = rank_texts(identity, source)
    text = trace_rank(identity, Side(topology=target), 0).manifest.text

    def planned() -> tuple[float, int]:
        """Of manifests that nothing is known of yet: seconds, and copies."""
        held, wanted = parsed(sources), Manifest.from_text(text)
        began = time.perf_counter()
        plan = plan_pull(wanted, held)
        return time.perf_counter() - began, sum(map(len, plan.copies))

    turns = [planned() for _ in range(rounds)]
    # Counting makes it slow, so that it has a turn of its own.
    tracemalloc.start()
    planned()
    _, peak = tracemalloc.get_traced_memory()
    return {
        "plan": [seconds for seconds, _ in turns],
        "memory_bytes": [peak],
        "copies": [turns[0][1]],
        "tensors": [len(identity.checkpoint)],
        "source_ranks": [source.world_size],
    }


def described(config: Mapping[str, object]) -> ModelIdentity:
    return ModelIdentity(
        model="m", revision="r", config=json.dumps(dict(config)), checkpoint=expected_specs(parse_config(config))
    )


def rank_texts(identity: ModelIdentity, topology: Topology) -> list[bytes]:
    """The manifest of each rank, as it is published."""
    side = Side(topology=topology)
    return [trace_rank(identity, side, rank).manifest.text for rank in range(topology.world_size)]


def parsed(texts: Sequence[bytes]) -> list[Manifest]:
    return [Manifest.from_text(text) for text in texts]


def with_digests(manifest: Manifest) -> Manifest:
    """With digests as weights have them, which no compression makes smaller."""
    chunks = len(chunk_bounds(manifest.storages, chunk_bytes=manifest.chunk_bytes)) - 1
    noise = random.Random(manifest.rank)
    tensors = (replace(tensor, digest=f"{noise.getrandbits(64):016x}") for tensor in manifest.tensors)
    return replace(manifest, tensors=tuple(tensors), chunk_digests=noise.randbytes(8 * chunks))


# -- processes and figures --


def measured(*arguments: str) -> Figures:
    """Run this module again, in a process of its own, to measure one case once."""
    figures: Figures = json.loads(run_module("benchmarks.planning", "measure", *arguments))
    return figures


def run_module(*arguments: str) -> str:
    return subprocess.run([sys.executable, "-m", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def seconds(values: Iterable[float]) -> str:
    return spread(values, 1, "s")


def spread(values: Iterable[float], unit: float, name: str) -> str:
    """Median, and the least and the most."""
    found = sorted(value / unit for value in values)
    return f"{statistics.median(found):8.3f} {name} ({found[0]:.3f} to {found[-1]:.3f})"


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Of the power of the size that fits best: the slope of a line through the logarithms."""
    return statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, values)]).slope


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        main(sys.argv[1:])
