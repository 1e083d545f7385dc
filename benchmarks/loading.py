"""What loading from disk costs on this machine, beside safetensors' own `load_file` and a copy.

Both fill the same preallocated shells whose pages were touched before, each time in a new process, taking turns, with
the files in the page cache (warm) and out of it (cold). Then one rank of TP8 with EP8 of a mixture of experts loads its
part: how much more than its own bytes is read.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
import xxhash
from safetensors.torch import load_file, save_file

from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.loading.direct import load_direct
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import ParameterTree, build_model, build_plain, parse_config

MIB = 1 << 20
OURS, THEIRS = "weightwire", "safetensors load_file + copy_"
HIDDEN, EXPERT, EXPERTS, LAYERS, HEADS, KV_HEADS, HEAD, VOCAB = 1024, 512, 64, 2, 16, 8, 64, 8192
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "moe_intermediate_size": EXPERT,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "num_experts": EXPERTS,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MOE_TOPOLOGY = Topology(tp=8, ep=8)

# What one process says on its standard output.
Figures: TypeAlias = Mapping[str, float]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=2048, help="size of the checkpoint (2048)")
    parser.add_argument("--shards", type=int, default=4, help="files that it is in (4)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case (5)")
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints are made; by default where temporary files go"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="weightwire-loading-") as temporary:
        dense, sparse = Path(temporary, "dense"), Path(temporary, "sparse")
        write(dense, dense_tensors(options.mib), shards=options.shards)
        write(sparse, expert_tensors(), shards=2)
        (sparse / "config.json").write_text(json.dumps(MOE))
        figures = {
            "mib": options.mib,
            "whole": compare(dense, rounds=options.rounds),
            "one_rank": {rank: one_rank(sparse, rank) for rank in (0, MOE_TOPOLOGY.world_size - 1)},
        }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    else:
        print(json.dumps(figures))


# -- cases --


def compare(folder: Path, *, rounds: int) -> Mapping[str, list[Figures]]:
    """Both ways in turns, warm and cold; every run has to fill the shells with the same bytes."""
    turns: dict[str, list[Figures]] = {}
    for _ in range(rounds):
        for cache in ("warm", "cold"):
            for way in (OURS, THEIRS):
                set_cache(folder, warm=cache == "warm")
                turns.setdefault(f"{cache}, {way}", []).append(measured("whole", way, str(folder)))
    if len({turn["digest"] for case in turns.values() for turn in case}) != 1:
        raise SystemExit("the two ways filled the shells with different bytes")
    print(f"{'page cache, way':44} {'seconds':>8} {'GB/s':>6} {'peak MiB above the shells':>26}")
    for case, found in turns.items():
        seconds = median(found, "seconds")
        peak = max(turn["peak_extra_bytes"] for turn in found) / MIB
        print(f"{case:44} {seconds:8.3f} {found[0]['bytes'] / seconds / 1e9:6.2f} {peak:26.0f}")
    for cache in ("warm", "cold"):
        ratio = median(turns[f"{cache}, {THEIRS}"], "seconds") / median(turns[f"{cache}, {OURS}"], "seconds")
        print(f"{cache}: weightwire loads {ratio:.2f} times as fast")
    return turns


def one_rank(folder: Path, rank: int) -> Figures:
    """Bytes that one rank reads, against those that it holds."""
    set_cache(folder, warm=False)
    found = measured("rank", str(rank), str(folder))
    print(
        f"rank {rank} of TP8 with EP8: {found['bytes_read'] / found['bytes']:.3f} times its own bytes are read "
        f"({found['bytes'] / MIB:.1f} of {found['checkpoint_bytes'] / MIB:.0f} MiB); from the disk, with all that it "
        f"reads ahead, {found['disk_bytes'] / found['bytes']:.2f} times"
    )
    return found


def measured(*arguments: str) -> Figures:
    """Run this file again, in a process of its own, to measure one case once."""
    done = subprocess.run([sys.executable, __file__, "measure", *arguments], check=True, capture_output=True, text=True)
    figures: Figures = json.loads(done.stdout)
    return figures


def median(turns: Sequence[Figures], field: str) -> float:
    return statistics.median(turn[field] for turn in turns)


# -- one measurement, in its own process --


def measure(what: str, which: str, folder: Path) -> Figures:
    if what == "rank":
        config = parse_config((folder / "config.json").read_text())
        model: ParameterTree = build_model(config, MOE_TOPOLOGY, int(which))
        fill: Callable[[ParameterTree, Path], float] = fill_directly
    else:
        with Checkpoint.open(folder) as checkpoint:
            model = build_plain(specs_of(checkpoint))
        fill = fill_directly if which == OURS else fill_by_copies
    shells = [shell.detach() for shell in model.parameters()]
    for shell in shells:
        shell.fill_(1)  # every page is there, as in a process that has allocated its weights before
    disk_before, resident, began = counter("io", "read_bytes"), reset_peak(), time.perf_counter()
    bytes_read = fill(model, folder)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "bytes": sum(shell.nbytes for shell in shells),
        "bytes_read": bytes_read,
        "checkpoint_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "disk_bytes": counter("io", "read_bytes") - disk_before,
        "peak_extra_bytes": counter("status", "VmHWM") * 1024 - resident,
        "digest": digest(shells),
    }


def fill_directly(model: ParameterTree, folder: Path) -> float:
    """Ours: opening the checkpoint is part of it. Returns the bytes of elements that were read."""
    with Checkpoint.open(folder) as checkpoint:
        return load_direct(model, checkpoint, control=Control(deadline_s=600)).bytes_read


def fill_by_copies(model: ParameterTree, folder: Path) -> float:
    """Theirs, file by file."""
    count, shells = 0, dict(model.named_parameters())
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            shells[name].detach().copy_(tensor)
            count += tensor.nbytes
    return count


def digest(shells: Sequence[torch.Tensor]) -> float:
    """The same for the same bytes, and small enough to be exact as a float."""
    seen = xxhash.xxh3_64()
    for shell in shells:
        seen.update(shell.reshape(-1).view(torch.uint8).numpy().data)
    return float(seen.intdigest() >> 12)


def reset_peak() -> int:
    """Let the peak of this process' resident memory begin anew; returns what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return counter("status", "VmRSS") * 1024


def counter(file: str, field: str) -> int:
    """One figure of /proc/self."""
    for line in Path("/proc/self", file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise SystemExit(f"/proc/self/{file} has no field {field}")


# -- checkpoints, and where their pages are --


def dense_tensors(mib: int) -> Iterator[tuple[str, torch.Tensor]]:
    """bf16 matrices as a 7B model has them, and a norm with each."""
    rows, left = 4096, mib * MIB
    for number in range(mib * MIB):
        if left <= 0:
            return
        size = min(left, 32 * MIB)
        left -= size
        yield f"layers.{number}.weight", noise(size // rows // 2, rows, seed=number)
        yield f"layers.{number}.norm.weight", noise(rows, seed=-number - 1)


def expert_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model that `MOE` describes."""
    shapes = dict[str, tuple[int, ...]]()
    for layer in range(LAYERS):
        at, experts = f"model.layers.{layer}", range(EXPERTS)
        shapes |= {f"{at}.{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{norm}_norm.weight": (HEAD,) for norm in ("q", "k")}
        shapes |= {f"{at}.self_attn.{part}_proj.weight": (KV_HEADS * HEAD, HIDDEN) for part in ("k", "v")}
        shapes |= {f"{at}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN)}
        shapes |= {f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD), f"{at}.mlp.gate.weight": (EXPERTS, HIDDEN)}
        shapes |= {
            f"{at}.mlp.experts.{e}.{part}_proj.weight": (EXPERT, HIDDEN) for e in experts for part in ("gate", "up")
        }
        shapes |= {f"{at}.mlp.experts.{e}.down_proj.weight": (HIDDEN, EXPERT) for e in experts}
    shapes |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes |= {"model.norm.weight": (HIDDEN,)}
    return ((name, noise(*shape, seed=number)) for number, (name, shape) in enumerate(shapes.items()))


def noise(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(abs(2 * seed) + (seed < 0))
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)


def write(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], *, shards: int) -> None:
    """Deal tensors into files of about the same number, and have them on the disk."""
    folder.mkdir()
    listed = list(tensors)
    for number in range(shards):
        file = folder / f"model-{number + 1:05}-of-{shards:05}.safetensors"
        # A published file has its tensors in some order of its own.
        members = listed[len(listed) * number // shards : len(listed) * (number + 1) // shards]
        save_file(dict(random.Random(number).sample(members, len(members))), file)
        with open(file, "rb") as written:
            os.fsync(written.fileno())


def set_cache(folder: Path, *, warm: bool) -> None:
    """Bring the files into the page cache, or out of it; stops everything if the machine does not do it."""
    for file in folder.glob("*.safetensors"):
        with open(file, "rb", buffering=0) as opened:
            if warm:
                while opened.read(8 * MIB):
                    pass
            else:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            share = resident_share(opened.fileno(), file.stat().st_size)
        if (share < 0.99) if warm else (share > 0.01):
            raise SystemExit(f"{file}: {share:.0%} of it is in the page cache, expected {'all' if warm else 'nothing'}")


def resident_share(fd: int, size: int) -> float:
    """How much of a file the page cache has, by asking for a mapping that touches nothing."""
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found)
        del first
    if failed:
        raise SystemExit("mincore does not work here, so nobody can say what is cold")
    return sum(page & 1 for page in found) / pages


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3], Path(sys.argv[4]))))
    else:
        main(sys.argv[1:])
