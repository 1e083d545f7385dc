"""`weightwire limit`: how much a running source gives."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from weightwire.service.cli import flags
from weightwire.service.cli.flags import Connection
from weightwire.service.cli.output import fail, print_json, start_logging, stdout
from weightwire.service.cli.rates import parse_rate
from weightwire.transfer.errors import TransferError
from weightwire.transfer.wire.limits import LimitOverrides


def limit(
    instance_id: Annotated[str, typer.Argument(help="The instance, as status shows it.")],
    *,
    max_rate: Annotated[
        str | None,
        typer.Option(
            help="Bytes per second to all readers of each of its processes, such as 1GB or 200Mbit, or unlimited.",
            show_default=False,
        ),
    ] = None,
    max_readers: Annotated[
        int | None,
        typer.Option(help="Reads at the same time, in each process; 0 lets nobody in.", min=0, show_default=False),
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Take back what was set: as the source was started.")] = False,
    service: flags.Service = flags.DEFAULT_SERVICE,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    allow_plain_http: flags.AllowPlainHttp = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "warning",
) -> int:
    """Set how much a running source gives; what is not named stays. Without an option: show what is set.

    A source hears of it when it renews its lease, and keeps it also towards readers that are under way.
    """
    start_logging(log_level)
    connection = Connection(service=service, token=token, tls_ca=tls_ca, allow_plain_http=allow_plain_http)
    try:
        rate = None if max_rate is None else parse_rate(max_rate, option="--max-rate")
        with connection.client() as client:
            limits = client.limits(instance_id)
            wanted = _changed(LimitOverrides() if reset else limits, max_readers=max_readers, rate=rate)
            if wanted != limits:
                limits = client.set_limits(instance_id, wanted)
    except TransferError as error:
        return fail(error, as_json=json)
    if json:
        print_json({"instance_id": instance_id, **asdict(limits), "error": None})
    else:
        stdout.print(f"{instance_id}: readers {_shown(limits.max_readers)}, bytes/s {_shown(limits.max_bytes_per_s)}")
    return 0


def _changed(limits: LimitOverrides, *, max_readers: int | None, rate: int | str | None) -> LimitOverrides:
    if max_readers is not None:
        limits = replace(limits, max_readers=max_readers)
    if rate is not None:
        limits = replace(limits, max_bytes_per_s=rate if isinstance(rate, int) else "unlimited")
    return limits


def _shown(value: int | str | None) -> str:
    return "as started" if value is None else str(value)
