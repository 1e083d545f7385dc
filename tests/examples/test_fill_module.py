"""examples/fill_module.py runs, and proves what it says by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "fill_module.py"


def test_example_fills_a_module_with_tied_weights_once() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    # 1000 x 64 floats once, four vectors of 64 of the norm, and its counter.
    assert done.stdout == f"7 tensors, {1000 * 64 * 4 + 4 * 64 * 4 + 8} bytes from peers, verified\n"
