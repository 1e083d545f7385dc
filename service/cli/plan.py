"""`weightwire plan`: what would move, before anything moves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from weightwire.service.cli import flags
from weightwire.service.cli.flags import Connection
from weightwire.service.cli.output import fail, human_bytes, print_json, start_logging, stdout
from weightwire.service.cli.render import rows_table
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.errors import TransferError
from weightwire.transfer.layouts import plain_layout
from weightwire.transfer.local_disk import identity_of

_TENSORS_SHOWN = 20


def plan(
    *,
    model: flags.Model,
    service: flags.Service = flags.DEFAULT_SERVICE,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            envvar="WEIGHTWIRE_CHECKPOINT",
            help="Plan for a target with this local checkpoint. Default: for one with a source's own layout.",
            show_default=False,
        ),
    ] = None,
    revision: flags.Revision = None,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    allow_plain_http: flags.AllowPlainHttp = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "info",
) -> int:
    """Ask the service for a dry run: which tensor would come from where, and why. Nothing moves."""
    start_logging(log_level)
    connection = Connection(service=service, token=token, tls_ca=tls_ca, allow_plain_http=allow_plain_http)
    try:
        with connection.client() as client:
            if checkpoint is None:
                answer = client.plan(model, revision=revision)
            else:
                with Checkpoint.open(checkpoint) as disk:
                    identity = identity_of(disk, model=model, revision=revision)
                    layout = plain_layout(specs_of(disk), identity)
                    answer = client.plan(model, revision=identity.revision, manifests=[layout])
    except TransferError as error:
        return fail(error, as_json=json)
    if json:
        print_json(answer)
    else:
        _print_plan(model, answer)
    return 0


def _print_plan(model: str, answer: dict[str, object]) -> None:
    tensors = cast("list[dict[str, object]]", answer["tensors"])
    ways = cast("dict[str, int]", answer["ways"])
    rows = [
        [way, str(count), human_bytes(sum(cast(int, t["bytes"]) for t in tensors if t["way"] == way))]
        for way, count in ways.items()
        if count
    ]
    stdout.print(rows_table(f"plan for {model}", ["way", "tensors", "bytes"], rows))
    from_disk = [tensor for tensor in tensors if tensor["way"] == "disk"]
    for tensor in from_disk[:_TENSORS_SHOWN]:
        stdout.print(f"  disk: {tensor['name']} ({tensor['reason']})", markup=False, highlight=False)
    if len(from_disk) > _TENSORS_SHOWN:
        stdout.print(f"  and {len(from_disk) - _TENSORS_SHOWN} more from disk")
