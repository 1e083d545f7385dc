"""One source and many targets on links that are capped: how far from one copy's time all of them are ready.

Every figure comes from `weightwire bench fanout`. Cases take turns, and medians are told. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("weightwire"))
MIDDLE = "4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to call `weightwire bench fanout`."""

    name: str
    hosts: int
    flags: tuple[str, ...] = ()

    def run(self, common: Sequence[str]) -> dict[str, float]:
        command = [COMMAND, "bench", "fanout", "--hosts", str(self.hosts), *self.flags, *common, "--json"]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        result = json.loads(done.stdout or "{}")
        if done.returncode:
            raise SystemExit(f"{self.name}: exit code {done.returncode}: {result}")
        sent = result["bytes_sent_by_first_host"] / result["bytes"]
        return {"ratio": float(result["ratio"]), "seconds": float(result["seconds"]), "copies": sent}


CASES = (
    Case(name="1 to 1", hosts=1),
    Case(name="1 to 8", hosts=8),
    Case(name="1 to 8, one killed", hosts=8, flags=("--kill", MIDDLE)),
    Case(name="1 to 8, one stopped", hosts=8, flags=("--stop", MIDDLE)),
    Case(name="1 to 8, one cut off", hosts=8, flags=("--cut", MIDDLE)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    common = ["--rate", options.rate, "--mib", str(options.mib)]
    turns: dict[str, list[dict[str, float]]] = {case.name: [] for case in CASES}
    for _ in range(options.rounds):
        for case in CASES:
            turns[case.name].append(case.run(common))
    print(f"{options.mib} MiB at {options.rate}, medians of {options.rounds}")
    print(f"{'case':22} {'seconds':>8} {'of size / rate':>15} {'copies sent by the source':>26}")
    for case in CASES:
        seconds, ratio, copies = (median(turns[case.name], field) for field in ("seconds", "ratio", "copies"))
        print(f"{case.name:22} {seconds:8.2f} {ratio:15.3f} {copies:26.2f}")
    if options.json:
        options.json.write_text(json.dumps(turns, indent=1))


def median(turns: list[dict[str, float]], field: str) -> float:
    return statistics.median(turn[field] for turn in turns)


if __name__ == "__main__":
    main()
