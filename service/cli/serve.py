"""`weightwire serve`: the control plane."""

from __future__ import annotations

from typing import Annotated

import typer

from weightwire.service.cli import flags
from weightwire.service.cli.output import print_json, start_logging, stdout
from weightwire.service.server import Server
from weightwire.service.settings import load_settings


def serve(
    *,
    host: flags.Host = "127.0.0.1",
    port: flags.Port = 8700,
    store: Annotated[
        str,
        typer.Option(envvar="WEIGHTWIRE_STORE", help="Where state lives: memory, or sqlite:PATH to survive restarts."),
    ] = "memory",
    token: Annotated[
        str | None,
        typer.Option(envvar="WEIGHTWIRE_TOKEN", help="Token that opens everything.", show_default=False),
    ] = None,
    read_token: Annotated[
        str | None,
        typer.Option(envvar="WEIGHTWIRE_READ_TOKEN", help="Token that opens what only reads.", show_default=False),
    ] = None,
    advertise: flags.Advertise = None,
    lease_s: Annotated[
        float,
        typer.Option(
            envvar="WEIGHTWIRE_LEASE_S", help="Seconds without renewal after which an instance is gone.", min=0.1
        ),
    ] = 15.0,
    tls_cert: flags.TlsCert = None,
    tls_key: flags.TlsKey = None,
    allow_plain_http: flags.AllowPlainHttp = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "info",
) -> None:
    """Run the control plane: who holds which weights, who may read them, how far transfers are.

    It never carries weights. Without a token it serves this machine only.
    """
    start_logging(log_level)
    overrides = {
        "host": host,
        "port": port,
        "store": store,
        "token": token,
        "read_token": read_token,
        "advertise": advertise,
        "lease_s": lease_s,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "allow_plain_http": allow_plain_http,
        "log_level": log_level.lower(),
    }
    server = Server(load_settings(overrides))

    def ready(url: str) -> None:
        if json:
            print_json({"ready": True, "url": url})
        else:
            stdout.print(f"weightwire serves on [bold]{url}[/], state in {store}; stop it with Ctrl-C")

    server.run_until_signal(ready)
