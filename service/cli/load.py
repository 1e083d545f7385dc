"""`weightwire load`: the local disk pipeline alone."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from weightwire.service.cli import flags
from weightwire.service.cli.output import byte_bar, fail, human_bytes, print_json, progress_bar, start_logging, stdout
from weightwire.service.cli.signals import on_signal
from weightwire.service.cli.topology import build_options, check_unused, chosen_ranks, chosen_topology
from weightwire.transfer.checkpoint import Checkpoint, DiscoveryOptions, find_checkpoint
from weightwire.transfer.checkpoint.formats import LoadFormat, served_format
from weightwire.transfer.control import Control
from weightwire.transfer.errors import SettingsError, TransferError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.local_disk import identity_of, load_checkpoint, load_streamed
from weightwire.transfer.local_tree import RankLoad, TreeLoader, TreeRequest
from weightwire.transfer.manifest import Topology
from weightwire.transfer.saving import check_destination, save_rank
from weightwire.transfer.shells import Shells


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """One rank's figures.

    Attributes:
        peak_rss_bytes: Of the process, until the rank was loaded.
    """

    rank: int
    seconds: float
    bytes_read: int
    loaded: int
    skipped: int
    constant: int
    peak_rss_bytes: int

    def to_json(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "seconds": self.seconds,
            "bytes_read": self.bytes_read,
            "peak_rss_bytes": self.peak_rss_bytes,
            "tensors": {"loaded": self.loaded, "skipped": self.skipped, "constant": self.constant},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sink:
    """Where loaded shells go.

    Attributes:
        folder: For the files; None keeps nothing.
        control: Deadline and stop button, looked at before each piece that is written.
        shows_progress: Whether bars are drawn.
    """

    folder: Path | None
    control: Control
    shows_progress: bool

    def save(self, shells: Callable[[], Shells]) -> None:
        if self.folder is not None:
            held = shells()
            total, rank = held.manifest.total_bytes, held.manifest.rank
            with byte_bar("saving", total=total, enabled=self.shows_progress, rank=rank) as saved:
                save_rank(held, self.folder, partial(self._advance, saved))

    def _advance(self, saved: Callable[[int], None], nbytes: int) -> None:
        self.control.check()
        saved(nbytes)


def load(
    checkpoint_dir: Annotated[Path, typer.Argument(help="Folder with a checkpoint, or one file of it.")],
    *,
    tp: flags.Tp = None,
    pp: flags.Pp = None,
    ep: flags.Ep = None,
    rank: flags.Rank = "all",
    vocab_multiple: flags.VocabMultiple = None,
    pad_heads: flags.PadHeads = False,
    expert_map: flags.ExpertMap = None,
    role: flags.RoleName = "main",
    fuse_shared_expert: flags.FuseSharedExpert = False,
    load_format: flags.LoadFormatName = "auto",
    pt_fallback: flags.PtFallback = False,
    unexpected: flags.Unexpected = "refuse",
    save: Annotated[
        Path | None,
        typer.Option(help="Folder for rank-<global rank>.safetensors, written rank by rank.", show_default=False),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave out tensors whose checkpoint name matches this pattern (*, ?). May be repeated."),
    ] = None,
    deadline_s: flags.DeadlineS = 3600.0,
    json: flags.Json = False,
    log_level: flags.LogLevel = "info",
) -> int:
    """Read a checkpoint from the local disk into memory, without any peer.

    Without a topology: every tensor whole, by its checkpoint name. With --tp, --pp or --ep: the parameters of each
    rank, by the names that engines give them, cut, fused and padded; one rank is in memory at a time.
    """
    start_logging(log_level)
    began = time.monotonic()
    control = Control(deadline_s=deadline_s)
    done = list[_Loaded]()
    try:
        kind = served_format(load_format)
        topology = chosen_topology(tp=tp, pp=pp, ep=ep)
        options = replace(
            build_options(vocab_multiple=vocab_multiple, pad_heads=pad_heads, expert_map=expert_map),
            role=flags.chosen_role(role), fuse_shared_expert=fuse_shared_expert,
        )  # fmt: skip
        request = TreeRequest(
            folder=checkpoint_dir, topology=topology or Topology(), load_format=kind, allow_pt_fallback=pt_fallback,
            build=options, unexpected=flags.unexpected_policy(unexpected),
        )  # fmt: skip
        if save is not None:
            check_destination(save, checkpoint=checkpoint_dir)
        sink = _Sink(folder=save, control=control, shows_progress=not json)
        with on_signal(lambda: control.cancel("stopped by a signal")):
            if topology is None:
                check_unused(rank=rank, options=options)
                done.append(_load_plain(request, control, sink, tuple(exclude or ())))
            elif exclude:
                raise SettingsError(
                    "--exclude: leaves shells of a topology empty; expected it without --tp, --pp, --ep"
                )
            else:
                done.extend(_load_ranks(request, chosen_ranks(rank, topology), control, sink))
    except TransferError as error:
        return fail(error, as_json=json, facts=_to_json(done, seconds=time.monotonic() - began))
    _print(done, seconds=time.monotonic() - began, as_json=json)
    return 0


def _load_plain(request: TreeRequest, control: Control, sink: _Sink, exclude: tuple[str, ...]) -> _Loaded:
    """Every tensor whole, by its checkpoint name."""
    if request.load_format is LoadFormat.DUMMY:
        raise SettingsError("--load-format dummy: without --tp, --pp or --ep nothing says which tensors there are")
    began = time.monotonic()
    options = DiscoveryOptions(load_format=request.load_format, allow_pt_fallback=request.allow_pt_fallback)
    files = find_checkpoint(request.folder, options)
    model = str(request.folder)
    with progress_bar("loading", enabled=sink.shows_progress) as moved:
        if files.container == "pickle":
            shells, bytes_read, skipped = load_streamed(
                files, ModelIdentity(model=model), control=control, exclude=exclude
            )
        else:
            with Checkpoint.open_files(files) as checkpoint:
                identity = identity_of(checkpoint, model=model)
                shells, result = load_checkpoint(
                    checkpoint, identity, control=control, exclude=exclude, on_progress=moved
                )
                bytes_read, skipped = result.bytes_disk, len(checkpoint.entries) - len(shells.manifest.tensors)
    seconds = time.monotonic() - began
    sink.save(lambda: shells)
    loaded = len(shells.manifest.tensors)
    return _Loaded(
        rank=0, seconds=seconds, bytes_read=bytes_read, loaded=loaded, skipped=skipped, constant=0,
        peak_rss_bytes=_peak_rss_bytes(),
    )  # fmt: skip


def _load_ranks(request: TreeRequest, ranks: range, control: Control, sink: _Sink) -> Iterator[_Loaded]:
    """One rank after the other, so that memory holds one."""
    with TreeLoader(request) as loader:
        for rank in ranks:
            with progress_bar("loading", enabled=sink.shows_progress, rank=rank) as moved:
                found = loader.load(rank, control, on_progress=moved)
            sink.save(partial(loader.shells, found))
            figures = _figures(found)
            # Not kept alive while the next one is loaded.
            del found
            yield figures


def _figures(found: RankLoad) -> _Loaded:
    counts = found.report.counts
    return _Loaded(
        rank=found.rank,
        seconds=found.seconds,
        bytes_read=found.bytes_read,
        loaded=found.num_loaded,
        skipped=sum(count for outcome, count in counts.items() if outcome is not Outcome.PLACED),
        constant=found.num_constant,
        peak_rss_bytes=_peak_rss_bytes(),
    )


def _peak_rss_bytes() -> int:
    # Linux counts the peak in kibibytes. Source: getrusage(2).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _to_json(done: list[_Loaded], *, seconds: float) -> dict[str, object]:
    return {
        "seconds": seconds,
        "bytes_read": sum(loaded.bytes_read for loaded in done),
        "peak_rss_bytes": _peak_rss_bytes(),
        "tensors": {
            "loaded": sum(loaded.loaded for loaded in done),
            "skipped": sum(loaded.skipped for loaded in done),
            "constant": sum(loaded.constant for loaded in done),
        },
        "ranks": [loaded.to_json() for loaded in done],
    }


def _print(done: list[_Loaded], *, seconds: float, as_json: bool) -> None:
    if as_json:
        print_json({**_to_json(done, seconds=seconds), "error": None})
        return
    for loaded in done:
        rate = human_bytes(loaded.bytes_read / loaded.seconds) if loaded.seconds else "0 B"
        constant = f", {loaded.constant} hold no checkpoint values" if loaded.constant else ""
        skipped = f", {loaded.skipped} names left out" if loaded.skipped else ""
        stdout.print(
            f"rank {loaded.rank}: loaded {loaded.loaded} tensors{constant}{skipped}, {human_bytes(loaded.bytes_read)} "
            f"in {loaded.seconds:.1f} s ({rate}/s)",
            soft_wrap=True,
        )
