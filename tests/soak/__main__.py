"""`make soak`: random faults from a seed, for as long as asked for."""

from __future__ import annotations

import argparse
import secrets
import sys
from functools import partial

from tests.soak.run import soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, help="of an earlier run, to play the same faults again")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    tell = partial(sys.stdout.write)
    tell(f"soak: {options.seconds:g} s, seed {seed}; again with: make soak SOAK_SEED={seed}\n")
    sys.stdout.flush()

    def line(text: str) -> None:
        tell(text + "\n")
        sys.stdout.flush()

    tally = soak(seed=seed, seconds=options.seconds, tell=line)
    ended = ", ".join(f"{count} {state}" for state, count in sorted(tally.states.items()))
    met = ", ".join(f"{mishap} {count}" for mishap, count in sorted(tally.hits.items()))
    line(f"soak: {tally.rounds} rounds, targets: {ended}; in time: {met}")
    line(f"soak: every byte equal, {tally.probes} questions in the middle, nothing left behind; seed {seed}")


if __name__ == "__main__":
    main()
