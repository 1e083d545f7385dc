"""`weightwire status` and `weightwire cancel`."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from weightwire.service.cli import flags
from weightwire.service.cli.flags import Connection
from weightwire.service.cli.output import fail, human_bytes, print_json, start_logging, stdout
from weightwire.service.cli.render import rows_table
from weightwire.service.client.api import Json
from weightwire.transfer.errors import TransferError


def status(
    transfer_id: Annotated[
        str | None, typer.Argument(help="A transfer. Without it: all instances and transfers.", show_default=False)
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Show a transfer's progress until it ends.")] = False,
    service: flags.Service = flags.DEFAULT_SERVICE,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    service_pin: flags.ServicePin = None,
    proxy: flags.ProxyRule = "none",
    allow_plain_http: flags.AllowPlainHttp = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "warning",
) -> int:
    """Show who holds which weights, and how far transfers are."""
    start_logging(log_level)
    connection = Connection(
        service=service, token=token, tls_ca=tls_ca, allow_plain_http=allow_plain_http, service_pin=service_pin,
        proxy=proxy,
    )  # fmt: skip
    try:
        with connection.client() as client:
            if transfer_id is None:
                answer: Json = {"instances": client.instances(), "transfers": client.transfers()}
            else:
                answer = client.transfer(transfer_id)
                for answer in client.events(transfer_id) if follow else ():
                    if not json:
                        _print_transfers([answer])
    except TransferError as error:
        return fail(error, as_json=json)
    if json:
        print_json({**answer, "error": answer.get("error")})
    elif transfer_id is None:
        _print_instances(cast("list[Json]", answer["instances"]))
        _print_transfers(cast("list[Json]", answer["transfers"]))
    elif not follow:
        _print_transfers([answer])
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


def _print_instances(instances: list[Json]) -> None:
    rows = [
        [str(item["instance_id"]), str(item["model"]), str(item["revision"] or "")[:12], str(item["state"])]
        for item in instances
    ]
    stdout.print(rows_table("instances", ["instance", "model", "revision", "state"], rows))


def _print_transfers(transfers: list[Json]) -> None:
    rows = [
        [
            str(item["transfer_id"]),
            str(item["target_instance_id"]),
            str(item["state"]),
            human_bytes(cast(float, item["bytes_peer"])),
            human_bytes(cast(float, item["bytes_disk"])),
            human_bytes(cast(float, item["bytes_total"])),
            f"{human_bytes(rate)}/s" if (rate := cast("float | None", item["rate_bytes_per_s"])) else "",
            f"{eta:.0f} s" if (eta := cast("float | None", item["eta_s"])) else "",
        ]
        for item in transfers
    ]
    headings = ["transfer", "target", "state", "from peers", "from disk", "of", "rate", "ETA"]
    stdout.print(rows_table("transfers", headings, rows))
