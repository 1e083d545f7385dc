"""`weightwire source`: loads a checkpoint and serves it."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weightwire.service.cli import flags
from weightwire.service.cli.flags import Connection, server_context
from weightwire.service.cli.output import byte_bar, human_bytes, progress_bar, start_logging
from weightwire.service.cli.serving import DataPlane, serve_until_signal
from weightwire.service.client.membership import Membership
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.local_disk import identity_of, load_checkpoint

_LOAD_DEADLINE_S = 24 * 3600.0


def source(
    checkpoint_dir: Annotated[
        Path, typer.Argument(help="Folder with safetensors files and config.json, or one .safetensors file.")
    ],
    *,
    model: flags.Model,
    service: flags.Service = flags.DEFAULT_SERVICE,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave out tensors whose checkpoint name matches this pattern (*, ?). May be repeated."),
    ] = None,
    revision: flags.Revision = None,
    weight_version: Annotated[
        int, typer.Option(help="Version of the weights; a hot update makes the next one.", min=0)
    ] = 1,
    instance_id: flags.InstanceId = None,
    host: flags.Host = "127.0.0.1",
    port: flags.Port = 0,
    advertise: flags.Advertise = None,
    max_readers: flags.MaxReaders = 64,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    tls_cert: flags.TlsCert = None,
    tls_key: flags.TlsKey = None,
    allow_plain_http: flags.AllowPlainHttp = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "info",
) -> None:
    """Load a checkpoint into memory and serve it to new instances, until stopped."""
    start_logging(log_level)
    connection = Connection(service=service, token=token, tls_ca=tls_ca, allow_plain_http=allow_plain_http)
    plane = DataPlane(
        instance_id=instance_id or f"source-{uuid.uuid4().hex[:12]}",
        host=host,
        port=port,
        advertise=advertise,
        max_readers=max_readers,
        tls=server_context(tls_cert, tls_key),
        allow_plain_http=allow_plain_http,
    )
    control = Control(deadline_s=_LOAD_DEADLINE_S)
    with Checkpoint.open(checkpoint_dir) as checkpoint, connection.client() as client, plane.open() as server:
        identity = identity_of(checkpoint, model=model, revision=revision)
        membership = Membership(
            client, plane.binding(server), model=model, revision=identity.revision, source=server.source
        )
        # First, so that a name or address that the service does not take is told before anything is loaded.
        with membership:
            with progress_bar("loading", enabled=not json) as moved:
                shells, loaded = load_checkpoint(
                    checkpoint, identity, control=control, exclude=exclude or (), on_progress=moved
                )
            with byte_bar("hashing", total=shells.manifest.total_bytes, enabled=not json) as hashed:
                manifest = shells.seal(hashed)
            server.source.publish(shells, weight_version=weight_version)
            membership.publish(manifest, weight_version=weight_version)
            what = (
                f"{len(manifest.tensors)} tensors, {human_bytes(manifest.total_bytes)} of [bold]{escape(model)}[/] "
                f"loaded in {loaded.seconds:.1f} s"
            )
            serve_until_signal(membership, what=what, as_json=json)
