"""What a pull costs on this machine: memory beside the shells, and many small tensors against one large one.

Every figure comes from `weightwire bench pull`, a source process and a target process over loopback, every byte
verified. Cases take turns, and the medians of the rounds are compared, since a machine's speed drifts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("weightwire"))
MIB = 1 << 20
LARGE_MIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to call `weightwire bench pull`."""

    name: str
    mib: int
    tensors: int = 1

    def run(self) -> dict[str, float]:
        sizes = ["--mib", str(self.mib), "--tensors", str(self.tensors)]
        done = subprocess.run([COMMAND, "bench", "pull", *sizes, "--json"], check=True, capture_output=True, text=True)
        result = json.loads(done.stdout)
        if result["verified"] is not True or result["bytes"] != self.mib * MIB:
            raise SystemExit(f"{self.name}: not verified: {result}")
        return {field: float(result[field]) for field in ("seconds", "cpu_seconds", "peak_extra_rss_bytes")}


ONE_TENSOR = Case(name="one tensor of 40 MiB", mib=40)
SMALL_TENSORS = Case(name="10,240 tensors of 4 KiB", mib=40, tensors=10_240)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, nargs="+", default=[1024, 4096], help="sizes for memory and speed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    cases = [*(Case(name=f"one tensor of {mib} MiB", mib=mib) for mib in options.mib), ONE_TENSOR, SMALL_TENSORS]
    turns: dict[str, list[dict[str, float]]] = {case.name: [] for case in cases}
    for number in range(options.rounds):
        for case in cases:
            # Large sizes are about memory, which does not vary; making and comparing their bytes takes the time.
            if number == 0 or case.mib <= LARGE_MIB:
                turns[case.name].append(case.run())
    print(f"{'case':26} {'GB/s':>6} {'CPU s/GiB':>10} {'MiB beside the shells, worst':>30}")
    for case in cases:
        print(row(case, turns[case.name]))
    ratio = median(turns[SMALL_TENSORS.name], "seconds") / median(turns[ONE_TENSOR.name], "seconds")
    print(f"{SMALL_TENSORS.name} take {ratio:.2f} times as long as {ONE_TENSOR.name}")
    if options.json:
        options.json.write_text(json.dumps({"turns": turns, "small_tensors_ratio": ratio}, indent=1))


def row(case: Case, turns: list[dict[str, float]]) -> str:
    rate = case.mib * MIB / median(turns, "seconds") / 1e9
    cpu = median(turns, "cpu_seconds") * 1024 / case.mib
    memory = max(turn["peak_extra_rss_bytes"] for turn in turns) / MIB
    return f"{case.name:26} {rate:6.2f} {cpu:10.2f} {memory:30.1f}"


def median(turns: list[dict[str, float]], field: str) -> float:
    return statistics.median(turn[field] for turn in turns)


if __name__ == "__main__":
    main()
