"""`weightwire status` and `weightwire cancel`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from weightwire.service.cli import flags
from weightwire.service.cli.flags import Connection
from weightwire.service.cli.fleet import Fleet, Rates, transfer_view
from weightwire.service.cli.fleet_view import Page, fleet_lines, transfer_details, transfer_lines
from weightwire.service.cli.output import fail, print_json, start_logging, stdout
from weightwire.service.cli.watch import Watch
from weightwire.service.client.api import ServiceClient
from weightwire.transfer.errors import SettingsError, TransferError


def status(
    transfer_id: Annotated[
        str | None, typer.Argument(help="A transfer. Without it: all instances and transfers.", show_default=False)
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Show a transfer's progress until it ends.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show everything, again and again, until q or Ctrl-C.")
    ] = False,
    interval_s: Annotated[float, typer.Option(help="Seconds between two looks of --watch.", min=0.1)] = 1.0,
    service: flags.Service = flags.DEFAULT_SERVICE,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    service_pin: flags.ServicePin = None,
    proxy: flags.ProxyRule = "none",
    allow_plain_http: flags.AllowPlainHttp = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "warning",
) -> int:
    """Show who holds which weights, how far transfers are, and who feeds whom.

    With --watch and --json: one JSON object for each look, a line each.
    """
    start_logging(log_level)
    if watch and (transfer_id is not None or follow):
        raise SettingsError("--watch: shows all transfers, expected neither a transfer nor --follow")
    connection = Connection(
        service=service, token=token, tls_ca=tls_ca, allow_plain_http=allow_plain_http, service_pin=service_pin,
        proxy=proxy,
    )  # fmt: skip
    try:
        with connection.client() as client:
            if watch:
                _watch(client, interval_s, as_json=json)
            elif transfer_id is None:
                _show_all(client, as_json=json)
            else:
                _show_one(client, transfer_id, follow=follow, as_json=json)
    except TransferError as error:
        return fail(error, as_json=json)
    return 0


def cancel(
    transfer_id: Annotated[str, typer.Argument(help="The transfer to stop.")],
    *,
    service: flags.Service = flags.DEFAULT_SERVICE,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    service_pin: flags.ServicePin = None,
    proxy: flags.ProxyRule = "none",
    allow_plain_http: flags.AllowPlainHttp = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "warning",
) -> int:
    """Stop a transfer; its target ends with exit code 3. One that has ended stays as it is."""
    start_logging(log_level)
    connection = Connection(
        service=service, token=token, tls_ca=tls_ca, allow_plain_http=allow_plain_http, service_pin=service_pin,
        proxy=proxy,
    )  # fmt: skip
    try:
        with connection.client() as client:
            answer = client.cancel(transfer_id)
    except TransferError as error:
        return fail(error, as_json=json)
    if json:
        # A transfer that was cancelled carries that as its own error; the command itself did not fail.
        print_json({"transfer_id": transfer_id, "state": answer["state"], "error": None})
    else:
        stdout.print(f"transfer {transfer_id} is {answer['state']}")
    return 0


def _watch(client: ServiceClient, interval_s: float, *, as_json: bool) -> None:
    look = Watch(client, interval_s=interval_s)
    if as_json:
        look.print_lines()
    else:
        look.draw(stdout)


def _show_all(client: ServiceClient, *, as_json: bool) -> None:
    instances, transfers = client.instances(), client.transfers()
    if as_json:
        print_json({"instances": instances, "transfers": transfers, "error": None})
        return
    fleet = Fleet.of(instances, transfers, at=time.time())
    _print_lines(fleet_lines(fleet, Rates(), Page(width=stdout.width)))


def _show_one(client: ServiceClient, transfer_id: str, *, follow: bool, as_json: bool) -> None:
    answer = client.transfer(transfer_id)
    page = Page(width=stdout.width)
    for number, answer in enumerate(client.events(transfer_id) if follow else ()):
        if not as_json:
            _print_lines(transfer_lines([transfer_view(answer)], Rates(), page)[min(number, 1) :])
    if as_json:
        print_json({**answer, "error": answer.get("error")})
    elif not follow:
        _print_lines(transfer_details(transfer_view(answer), Rates(), page))


def _print_lines(lines: Sequence[Text]) -> None:
    # Ids that are copied stay in one piece, whatever the width.
    for line in lines:
        stdout.print(line, soft_wrap=True)
