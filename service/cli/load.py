"""`weightwire load`: the local disk pipeline alone."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Annotated

import typer

from weightwire.service.cli import flags
from weightwire.service.cli.output import byte_bar, fail, human_bytes, print_json, progress_bar, start_logging, stdout
from weightwire.service.cli.signals import on_signal
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.errors import TransferError
from weightwire.transfer.filling import FillResult
from weightwire.transfer.loading import identity_of, load_checkpoint
from weightwire.transfer.saving import check_destination, save_rank


def load(
    checkpoint_dir: Annotated[Path, typer.Argument(help="Folder with safetensors files, or one such file.")],
    *,
    save: Annotated[
        Path | None, typer.Option(help="Folder for rank-0.safetensors, written at the end.", show_default=False)
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave out tensors whose checkpoint name matches this pattern (*, ?). May be repeated."),
    ] = None,
    deadline_s: flags.DeadlineS = 3600.0,
    json: flags.Json = False,
    log_level: flags.LogLevel = "info",
) -> int:
    """Read a checkpoint from the local disk into memory, without any peer."""
    start_logging(log_level)
    began = time.monotonic()
    control = Control(deadline_s=deadline_s)
    try:
        if save is not None:
            check_destination(save, checkpoint=checkpoint_dir)
        with Checkpoint.open(checkpoint_dir) as checkpoint, on_signal(lambda: control.cancel("stopped by a signal")):
            identity = identity_of(checkpoint, model=str(checkpoint_dir))
            with progress_bar("loading", enabled=not json) as moved:
                shells, result = load_checkpoint(
                    checkpoint, identity, control=control, exclude=exclude or (), on_progress=moved
                )
            if save is not None:
                with byte_bar("saving", total=shells.manifest.total_bytes, enabled=not json) as saved:
                    save_rank(shells, save, saved)
            figures = _figures(result, skipped=len(checkpoint.entries) - len(shells.manifest.tensors), began=began)
            figures["bytes_read"] = checkpoint.bytes_read
    except TransferError as error:
        return fail(error, as_json=json, facts={"seconds": time.monotonic() - began, "ranks": []})
    if json:
        print_json({**figures, "ranks": [{"rank": 0, **figures}], "error": None})
    else:
        rate = human_bytes(checkpoint.bytes_read / result.seconds) if result.seconds else "0 B"
        stdout.print(
            f"loaded {len(shells.manifest.tensors)} tensors, {human_bytes(checkpoint.bytes_read)} "
            f"in {result.seconds:.1f} s ({rate}/s)"
        )
    return 0


def _figures(result: FillResult, *, skipped: int, began: float) -> dict[str, object]:
    return {
        "seconds": time.monotonic() - began,
        "bytes_read": result.bytes_disk,
        # Linux counts the peak in kibibytes. Source: getrusage(2).
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "tensors": {"loaded": result.tensors["disk"], "skipped": skipped, "constant": result.tensors["constant"]},
    }
