"""`weightwire bench`: what transfers cost on this machine, and what they make of faults."""

from __future__ import annotations

import typer

from weightwire.service.cli import bench_fanout, bench_faults, bench_pull

app = typer.Typer(no_args_is_help=True, help="Measure transfers between processes of this machine.")
app.command("pull")(bench_pull.bench_pull)
app.command("fanout")(bench_fanout.bench_fanout)
app.command("faults")(bench_faults.bench_faults)
