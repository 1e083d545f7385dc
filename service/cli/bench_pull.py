"""`weightwire bench pull`: what this machine can do, measured between two processes over loopback."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from weightwire.service.cli import flags
from weightwire.service.cli.bench_endpoint import BenchSource, open_sources
from weightwire.service.cli.bench_source import synthetic_tensors
from weightwire.service.cli.output import human_bytes, print_json, start_logging, stdout
from weightwire.transfer.control import Control
from weightwire.transfer.errors import IntegrityError, SourceUnreachableError
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.planning import Supply, plan_pull
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.coverage import Coverage
from weightwire.transfer.wire.puller import Puller, PullOptions

_PAGE_TOUCH = 1
# Two processes that have just started are slow for a moment; the first bytes are not what is measured.
_WARM_UP_BYTES = 64 << 20


def bench_pull(
    *,
    mib: Annotated[int, typer.Option(help="Size of the transfer, in MiB.", min=1)] = 1024,
    streams: Annotated[int, typer.Option(help="Connections to the source.", min=1, max=64)] = 2,
    tensors: Annotated[int, typer.Option(help="Cut it into so many tensors, each in memory of its own.", min=1)] = 1,
    deadline_s: flags.DeadlineS = 120.0,
    json: flags.Json = False,
    log_level: flags.LogLevel = "warning",
) -> int:
    """Pull synthetic weights from a source process into touched memory, verified; connections are open before.

    The clock runs from the first request, after a warm-up of 64 MiB on the same connections, to the last verified
    byte. Afterwards every byte is compared.
    """
    start_logging(log_level)
    with open_sources(None, nbytes=mib << 20, tensors=tensors) as (source,):
        figures = _measure(source, streams=streams, control=Control(deadline_s=deadline_s))
    if json:
        print_json({**figures.to_json(), "error": None})
    else:
        rate = human_bytes(figures.nbytes / figures.seconds)
        stdout.print(
            f"{human_bytes(figures.nbytes)} in {figures.seconds:.3f} s, {rate}/s, verified; "
            f"{figures.cpu_seconds:.2f} s of CPU, {human_bytes(figures.peak_extra_rss_bytes)} beside the shells"
        )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    nbytes: int
    seconds: float
    cpu_seconds: float
    peak_extra_rss_bytes: int

    def to_json(self) -> dict[str, object]:
        return {
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "verified": True,
            "peak_extra_rss_bytes": self.peak_extra_rss_bytes,
        }


def _measure(source: BenchSource, *, streams: int, control: Control) -> _Figures:
    endpoint, manifest, pid = source.endpoint, source.manifest, source.worker.pid
    # The threads that fill memory go on spinning for a while, on the cores that are measured.
    torch.set_num_threads(1)
    shells = Shells.allocate(manifest)
    shells.fill(_PAGE_TOUCH)
    plan = plan_pull(shells.manifest, [manifest])
    with Puller(shells, [endpoint], {manifest.digest: manifest}, PullOptions(streams=streams)) as puller:
        puller.connect(plan)
        _warm_up(puller, shells, manifest, control)
        _reset_peak()
        rss, cpu = _status_bytes("VmRSS"), _cpu_seconds(pid)
        began = time.perf_counter()
        puller.pull(plan, control)
        seconds = time.perf_counter() - began
        cpu, peak = _cpu_seconds(pid) - cpu, _status_bytes("VmHWM")
        if puller.failures:
            raise SourceUnreachableError(puller.failures[0].detail)
        if puller.coverage.target.total != manifest.total_bytes:
            raise IntegrityError("bench: bytes are missing at the end")
    for name, expected in synthetic_tensors(manifest):
        if not shells.tensor(name).equal(expected):
            raise IntegrityError(f"tensor {name!r}: differs from what the source made")
    return _Figures(
        nbytes=manifest.total_bytes, seconds=seconds, cpu_seconds=cpu, peak_extra_rss_bytes=max(0, peak - rss)
    )


def _warm_up(puller: Puller, shells: Shells, manifest: Manifest, control: Control) -> None:
    """Pull the first bytes over the connections that are measured later, and wipe them out."""
    rest = IntervalSet([(_WARM_UP_BYTES, max(_WARM_UP_BYTES, manifest.total_bytes))])
    puller.pull(plan_pull(shells.manifest, [manifest], Supply(covered=rest)), control)
    shells.fill(_PAGE_TOUCH)
    puller.coverage = Coverage()


def _reset_peak() -> None:
    # Source: proc(5), /proc/pid/clear_refs: 5 resets the peak of the resident set.
    Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_seconds(pid: int) -> float:
    """User and system time of this process and of `pid`."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return time.process_time() + (int(fields[11]) + int(fields[12])) / ticks
