"""`weightwire bench faults`: what a fault costs in the middle of a pull, against pulls that nothing happens to."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import typer

from weightwire.service.cli import flags
from weightwire.service.cli.bench_endpoint import BenchSource, open_sources
from weightwire.service.cli.bench_link import LinkFaults
from weightwire.service.cli.bench_source import synthetic_tensors
from weightwire.service.cli.bench_worker import Json
from weightwire.service.cli.exit_codes import DONE, FAILED
from weightwire.service.cli.output import error_json, human_bytes, print_json, start_logging, stdout
from weightwire.service.cli.render import rows_table
from weightwire.transfer.control import Control
from weightwire.transfer.errors import IntegrityError, SettingsError, TransferError
from weightwire.transfer.filling import Origins, fill
from weightwire.transfer.session import RankProgress
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.puller import PullOptions

_MIB = 1 << 20
# One bit in every hundred chunks: what a frame adds to its chunk does not count here.
_FLIP_EVERY_BYTES = 100 * _MIB
_PAGE_TOUCH = 1
# Slow enough that the link decides on any machine, and fast enough that one gibibyte takes some seconds.
_LINK_BYTES_PER_S = 400e6
_SLOW_SHARE = 0.25

# Does something to the sources of a pull.
Hit = Callable[[Sequence[BenchSource]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCase:
    """A set-up, and what happens in it. The first source is the one with the fault.

    Attributes:
        undisturbed: The links of the set-up without the fault; None is a source without a link.
        links: Those with it.
        before: Done before the pull begins.
        half: Done when half of the bytes are verified.
        ideal_share: Of the time of the undisturbed set-up, what the ideal is; 1 where the set-ups are alike.
    """

    name: str
    undisturbed: tuple[LinkFaults | None, ...]
    links: tuple[LinkFaults | None, ...]
    before: Hit | None = None
    half: Hit | None = None
    ideal_share: float = 1.0


def _signalled(sources: Sequence[BenchSource], *, number: int) -> None:
    sources[0].worker.signal(number)


def _dead(sources: Sequence[BenchSource]) -> None:
    sources[0].worker.close()


def fault_cases(nbytes: int) -> tuple[FaultCase, ...]:
    """Every case, for weights of so many bytes."""
    two, linked = (None, None), (LinkFaults(), LinkFaults())
    fast = LinkFaults(bytes_per_s=_LINK_BYTES_PER_S)
    slow = LinkFaults(bytes_per_s=_LINK_BYTES_PER_S * _SLOW_SHARE)
    # Not at the end of a frame, and in the first half of what this source is asked for.
    cut = LinkFaults(cut_after_bytes=nbytes // 8 + 12345)
    flips = LinkFaults(flip_every_bytes=_FLIP_EVERY_BYTES)
    return (
        FaultCase(name="killed", undisturbed=two, links=two, half=partial(_signalled, number=signal.SIGKILL)),
        FaultCase(name="stopped", undisturbed=two, links=two, half=partial(_signalled, number=signal.SIGSTOP)),
        FaultCase(name="dead", undisturbed=two, links=two, before=_dead),
        FaultCase(name="flips", undisturbed=linked, links=(flips, LinkFaults())),
        FaultCase(name="flips-alone", undisturbed=linked[:1], links=(flips,)),
        FaultCase(name="truncated", undisturbed=linked, links=(cut, LinkFaults())),
        FaultCase(name="slow", undisturbed=(fast,), links=(slow, fast), ideal_share=1 / (1 + _SLOW_SHARE)),
    )


def bench_faults(
    *,
    mib: Annotated[int, typer.Option(help="Size of the weights, in MiB.", min=1)] = 1024,
    case: Annotated[list[str] | None, typer.Option(help="Only this case. May be repeated.", show_default=False)] = None,
    rounds: Annotated[int, typer.Option(help="Of which medians are taken.", min=1)] = 3,
    streams: Annotated[int, typer.Option(help="Connections to each source.", min=1, max=64)] = 2,
    deadline_s: flags.DeadlineS = 120.0,
    json: flags.Json = False,
    log_level: flags.LogLevel = "error",
) -> int:
    """Pull synthetic weights while sources die, stop, flip bits, break off or crawl; every byte is compared afterwards.

    Each case takes turns with the same set-up undisturbed, and `extra_seconds` is the difference of the medians. With
    --json there is a line for each case.
    """
    start_logging(log_level)
    torch.set_num_threads(1)
    cases = _chosen(case or (), mib << 20)
    bench = _Bench(nbytes=mib << 20, streams=streams, deadline_s=deadline_s)
    all_ready = True
    rows = []
    for each in cases:
        figures = bench.measure(each, rounds)
        all_ready = all_ready and figures.ready
        if json:
            print_json(figures.to_json())
        else:
            rows.append(figures.to_row())
    if not json:
        headings = ["case", "seconds", "extra", "received", "of", "ready"]
        stdout.print(rows_table(f"{rounds} rounds, medians", headings, rows))
    return DONE if all_ready else FAILED


def _chosen(names: Sequence[str], nbytes: int) -> list[FaultCase]:
    cases = {each.name: each for each in fault_cases(nbytes)}
    for name in names:
        if name not in cases:
            raise SettingsError(f"--case {name!r}: expected one of {', '.join(cases)}")
    return [cases[name] for name in names or cases]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pull:
    """One pull.

    Attributes:
        bytes_received: Payload, wanted or not.
        failures: Codes with which sources were given up.
        error: Why it did not become ready.
    """

    seconds: float
    bytes_received: int
    failures: tuple[str, ...] = ()
    error: TransferError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """A case, measured.

    Attributes:
        pulls: With the fault, one of each round.
        undisturbed_seconds: Median of the same set-up without it; for a slow source, of the ideal sum of rates.
    """

    case: FaultCase
    nbytes: int
    pulls: Sequence[_Pull]
    undisturbed_seconds: float

    @property
    def seconds(self) -> float:
        return statistics.median(pull.seconds for pull in self.pulls)

    @property
    def ready(self) -> bool:
        return all(pull.error is None for pull in self.pulls)

    @property
    def bytes_received(self) -> int:
        """Of the worst round."""
        return max(pull.bytes_received for pull in self.pulls)

    def to_json(self) -> Json:
        errors = [error_json(pull.error) for pull in self.pulls if pull.error is not None]
        return {
            "case": self.case.name,
            "seconds": self.seconds,
            "extra_seconds": self.seconds - self.undisturbed_seconds,
            "bytes_received": self.bytes_received,
            "ready": self.ready,
            "bytes": self.nbytes,
            "undisturbed_seconds": self.undisturbed_seconds,
            "failures": sorted({code for pull in self.pulls for code in pull.failures}),
            "error": errors[0] if errors else None,
        }

    def to_row(self) -> list[str]:
        extra = self.seconds - self.undisturbed_seconds
        received = f"{self.bytes_received / self.nbytes:.3f} x"
        ready = "ready" if self.ready else "failed"
        return [self.case.name, f"{self.seconds:.2f} s", f"{extra:+.2f} s", received, human_bytes(self.nbytes), ready]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """Pulls of one size."""

    nbytes: int
    streams: int
    deadline_s: float

    def measure(self, case: FaultCase, rounds: int) -> _Figures:
        """The case and its set-up undisturbed, in turns.

        Raises:
            TransferError: If the set-up fails that nothing is done to.
        """
        calm, pulls = [], []
        for _ in range(rounds):
            undisturbed = self._pull(case.undisturbed)
            if undisturbed.error is not None:
                raise undisturbed.error
            calm.append(undisturbed.seconds)
            pulls.append(self._pull(case.links, before=case.before, half=case.half))
        undisturbed_s = statistics.median(calm) * case.ideal_share
        return _Figures(case=case, nbytes=self.nbytes, pulls=pulls, undisturbed_seconds=undisturbed_s)

    def _pull(
        self, links: tuple[LinkFaults | None, ...], *, before: Hit | None = None, half: Hit | None = None
    ) -> _Pull:
        with open_sources(*links, nbytes=self.nbytes, tensors=max(1, self.nbytes // (64 * _MIB))) as sources:
            if before is not None:
                before(sources)
            manifest = sources[0].manifest
            shells = Shells.allocate(manifest)
            shells.fill(_PAGE_TOUCH)
            origins = Origins(endpoints=[source.endpoint for source in sources], manifests={manifest.digest: manifest})
            watch = _AtHalf(partial(half, sources) if half else None)
            control = Control(deadline_s=self.deadline_s)
            options = PullOptions(streams=self.streams)
            try:
                result = fill(shells, origins, control=control, options=options, on_progress=watch.moved)
            except TransferError as error:
                return _Pull(seconds=self.deadline_s - control.remaining_s, bytes_received=watch.verified, error=error)
        if not all(shells.tensor(name).equal(content) for name, content in synthetic_tensors(shells.manifest)):
            raise IntegrityError("bench: the shells differ from what the sources made, after they were verified")
        return _Pull(
            seconds=result.seconds,
            bytes_received=result.bytes_received,
            failures=tuple(failure.code for failure in result.failures),
        )


class _AtHalf:
    """Acts once, when half of the bytes are verified.

    Attributes:
        verified: Bytes so far.
    """

    def __init__(self, act: Callable[[], None] | None) -> None:
        self.verified = 0
        self._act = act

    def moved(self, progress: RankProgress) -> None:
        self.verified = progress.bytes_peer
        if self._act is not None and progress.bytes_peer * 2 >= progress.bytes_total > 0:
            act, self._act = self._act, None
            act()
