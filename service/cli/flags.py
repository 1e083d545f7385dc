"""Flags that several commands share, each with its environment variable."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from weightwire.service.client.api import ServiceClient
from weightwire.service.settings import proxies_of
from weightwire.transfer.address import Address
from weightwire.transfer.errors import RequestError, SettingsError
from weightwire.transfer.loading.loop import UnexpectedPolicy
from weightwire.transfer.models.blueprint import Role
from weightwire.transfer.staging import Staging
from weightwire.transfer.wire.connecting import Network
from weightwire.transfer.wire.sockets import SocketOptions
from weightwire.transfer.wire.trust import client_context, parse_fingerprint, read_fingerprint

_CONNECTION = "Connection"
_SERVING = "Serving"

Service = Annotated[
    str, typer.Option(envvar="WEIGHTWIRE_SERVICE", help="URL of the control plane.", rich_help_panel=_CONNECTION)
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="WEIGHTWIRE_TOKEN",
        help="Bearer token of the control plane.",
        show_default=False,
        rich_help_panel=_CONNECTION,
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="WEIGHTWIRE_TLS_CA",
        help="PEM file with the certificates to trust for https, in place of the system's.",
        show_default=False,
        rich_help_panel=_CONNECTION,
    ),
]
ServicePin = Annotated[
    str | None,
    typer.Option(
        envvar="WEIGHTWIRE_SERVICE_PIN",
        help="SHA-256 of the control plane's certificate: that one and no other is believed, and needs no authority.",
        show_default=False,
        rich_help_panel=_CONNECTION,
    ),
]
ProxyRule = Annotated[
    str,
    typer.Option(
        "--proxy",
        envvar="WEIGHTWIRE_PROXY",
        help="HTTP proxy to the control plane and to sources: none, a URL, or env for HTTP_PROXY, HTTPS_PROXY, "
        "ALL_PROXY and NO_PROXY.",
        rich_help_panel=_CONNECTION,
    ),
]
SocketBuffer = Annotated[
    int | None,
    typer.Option(
        envvar="WEIGHTWIRE_SOCKET_BUFFER",
        help="Bytes of window of each connection, for fat and long links. Default: the kernel finds it out.",
        min=4096, max=1 << 30, show_default=False, rich_help_panel=_CONNECTION,
    ),
]  # fmt: skip
FirstByteS = Annotated[
    float,
    typer.Option(
        envvar="WEIGHTWIRE_FIRST_BYTE_S",
        help="Seconds that an answer may take to begin, where a proxy takes answers whole before it passes them on.",
        min=0.0, max=3600.0, rich_help_panel=_CONNECTION,
    ),
]  # fmt: skip
AllowPlainHttp = Annotated[
    bool,
    typer.Option(
        "--allow-plain-http",
        envvar="WEIGHTWIRE_ALLOW_PLAIN_HTTP",
        help="Let tokens and tickets travel unencrypted beyond this machine.",
        rich_help_panel=_CONNECTION,
    ),
]
Model = Annotated[str, typer.Option(envvar="WEIGHTWIRE_MODEL", help="Model id, such as org/name.", show_default=False)]
Revision = Annotated[
    str | None,
    typer.Option(
        envvar="WEIGHTWIRE_REVISION",
        help="Revision of the model. Default: the digest of the checkpoint's config and headers.",
        show_default=False,
    ),
]
RevisionWanted = Annotated[
    str | None,
    typer.Option(
        envvar="WEIGHTWIRE_REVISION",
        help="Revision of the model. Default: that of --checkpoint; without one, the service's choice.",
        show_default=False,
    ),
]
InstanceId = Annotated[
    str | None,
    typer.Option(envvar="WEIGHTWIRE_INSTANCE_ID", help="Name of this instance. Default: random.", show_default=False),
]
Epoch = Annotated[
    int | None,
    typer.Option(
        envvar="WEIGHTWIRE_EPOCH",
        help="Common to all processes of the instance; a higher one takes its place. Default: new for each start of a "
        "process that holds all ranks, 1 for one that holds some.",
        min=0, max=(1 << 63) - 1, show_default=False,
    ),
]  # fmt: skip
Host = Annotated[str, typer.Option(envvar="WEIGHTWIRE_HOST", help="Address to serve on.", rich_help_panel=_SERVING)]
Port = Annotated[
    int,
    typer.Option(
        envvar="WEIGHTWIRE_PORT", help="Port to serve on; 0 takes any free one.", min=0, max=65535,
        rich_help_panel=_SERVING,
    ),
]  # fmt: skip
Advertise = Annotated[
    str | None,
    typer.Option(
        envvar="WEIGHTWIRE_ADVERTISE",
        help="URL that others connect to. Default: the address that is served on.",
        show_default=False,
        rich_help_panel=_SERVING,
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        envvar="WEIGHTWIRE_TLS_CERT",
        help="PEM file with the certificate chain to serve https with.",
        show_default=False,
        rich_help_panel=_SERVING,
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(
        envvar="WEIGHTWIRE_TLS_KEY",
        help="PEM file with the certificate's key.",
        show_default=False,
        rich_help_panel=_SERVING,
    ),
]
AdvertisePin = Annotated[
    str | None,
    typer.Option(
        envvar="WEIGHTWIRE_ADVERTISE_PIN",
        help="SHA-256 of the certificate that is met at --advertise, or none to leave it to authorities. Default: that "
        "of --tls-cert.",
        show_default=False,
        rich_help_panel=_SERVING,
    ),
]
MaxReaders = Annotated[
    int,
    typer.Option(
        envvar="WEIGHTWIRE_MAX_READERS",
        help="Reads served at the same time; more are told to come back.",
        min=1,
        rich_help_panel=_SERVING,
    ),
]
MaxRate = Annotated[
    str | None,
    typer.Option(
        envvar="WEIGHTWIRE_MAX_RATE",
        help="Bytes per second to all readers together, such as 1GB or 200Mbit. Default: unlimited.",
        show_default=False,
        rich_help_panel=_SERVING,
    ),
]
ServerProcess = Annotated[
    bool,
    typer.Option(
        "--server-process",
        envvar="WEIGHTWIRE_SERVER_PROCESS",
        help="Serve from a process of its own, on shared memory.",
        rich_help_panel=_SERVING,
    ),
]
DrainS = Annotated[
    float,
    typer.Option(
        envvar="WEIGHTWIRE_DRAIN_S",
        help="Seconds that readers get to finish when it stops.",
        min=0.0,
        rich_help_panel=_SERVING,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, for programs; logs go to stderr.")]
LogLevel = Annotated[
    str, typer.Option(envvar="WEIGHTWIRE_LOG_LEVEL", help="debug, info, warning or error; logs go to stderr.")
]
DeadlineS = Annotated[
    float,
    typer.Option(envvar="WEIGHTWIRE_DEADLINE_S", help="Seconds after which it fails with exit code 4.", min=0.001),
]

MinRate = Annotated[
    float,
    typer.Option(
        envvar="WEIGHTWIRE_MIN_RATE", help="Bytes per second; a source that delivers less is given up.", min=0
    ),
]
StallWindowS = Annotated[
    float,
    typer.Option(
        envvar="WEIGHTWIRE_STALL_WINDOW_S",
        help="After how long, if others have what it has; else after ten seconds.",
        min=0.1,
    ),
]

_LAYOUT = "Topology"
LoadFormatName = Annotated[
    str,
    typer.Option("--load-format", help="auto, safetensors, pt, npcache (*.bin), mistral or dummy."),
]
PtFallback = Annotated[bool, typer.Option("--pt-fallback", help="Try *.pt files last.")]
Tp = Annotated[
    int | None,
    typer.Option(
        "--tp", help="Tensor-parallel ranks. Any of --tp, --pp, --ep: runtime names, cut for each rank.",
        min=1, show_default=False, rich_help_panel=_LAYOUT,
    ),
]  # fmt: skip
Pp = Annotated[
    int | None,
    typer.Option("--pp", help="Pipeline stages.", min=1, show_default=False, rich_help_panel=_LAYOUT),
]
Ep = Annotated[
    int | None,
    typer.Option(
        "--ep", help="Groups that the experts are dealt to; divides --tp.", min=1, show_default=False,
        rich_help_panel=_LAYOUT,
    ),
]  # fmt: skip
Rank = Annotated[str, typer.Option("--rank", help="One global rank, or all.", rich_help_panel=_LAYOUT)]
VocabMultiple = Annotated[
    int | None,
    typer.Option(
        help="Pad the vocabulary to a multiple of it. Default: 64 x tp.", min=1, show_default=False,
        rich_help_panel=_LAYOUT,
    ),
]  # fmt: skip
PadHeads = Annotated[
    bool,
    typer.Option(
        "--pad-heads", help="Pad head counts that tp does not divide, instead of refusing.", rich_help_panel=_LAYOUT
    ),
]
ExpertMap = Annotated[
    Path | None,
    typer.Option(
        help="JSON file: for each of the ep groups the list of experts in its slots, such as [[0,1,0],[2,3]].",
        show_default=False, rich_help_panel=_LAYOUT,
    ),
]  # fmt: skip
RoleName = Annotated[
    str,
    typer.Option("--role", help="main, or draft: the layer behind a model's last one alone.", rich_help_panel=_LAYOUT),
]
FuseSharedExpert = Annotated[
    bool,
    typer.Option(
        "--fuse-shared-expert", help="Lay a shared expert behind the routed ones, in the same tensors.",
        rich_help_panel=_LAYOUT,
    ),
]  # fmt: skip
Unexpected = Annotated[
    str, typer.Option(help="What to do about names that the model has no place for: refuse or warn.")
]


StagingName = Annotated[
    str,
    typer.Option(
        "--staging", envvar="WEIGHTWIRE_STAGING",
        help="auto, or always: copy through pinned buffers even where memory is on the CPU.",
    ),
]  # fmt: skip


def staging_of(text: str) -> Staging:
    """Raises:
    SettingsError: If it is no mode.
    """
    if text not in ("auto", "always"):
        raise SettingsError(f"--staging {text!r}: expected auto or always")
    return Staging(mode="always" if text == "always" else "auto")


def unexpected_policy(text: str) -> UnexpectedPolicy:
    """Raises:
    SettingsError: If it is no policy.
    """
    if text not in ("refuse", "warn"):
        raise SettingsError(f"--unexpected {text!r}: expected refuse or warn")
    return "refuse" if text == "refuse" else "warn"


def chosen_role(text: str) -> Role:
    """Raises:
    SettingsError: If it is no role.
    """
    if text not in ("main", "draft"):
        raise SettingsError(f"--role {text!r}: expected main or draft")
    return "draft" if text == "draft" else "main"


DEFAULT_SERVICE = "http://127.0.0.1:8700"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach the control plane, and whom to trust."""

    service: str
    token: str | None
    tls_ca: Path | None
    allow_plain_http: bool
    service_pin: str | None = None
    proxy: str = "none"
    socket_buffer: int | None = None

    def client(self) -> ServiceClient:
        """A client of the control plane.

        Raises:
            SettingsError: If the address cannot be one, or the token would travel unencrypted.
        """
        check_address("--service", self.service)
        pin = None if self.service_pin is None else parse_pin("--service-pin", self.service_pin)
        if pin is not None and Address.parse(self.service).scheme != "https":
            raise SettingsError(f"--service-pin: {self.service} shows no certificate, expected https")
        return ServiceClient(
            self.service,
            token=self.token,
            allow_plain_http=self.allow_plain_http,
            tls=self._context(pin) if pin else self.trust(),
            proxies=proxies_of(self.proxy),
        )

    def trust(self) -> ssl.SSLContext | None:
        """What https connections to sources trust beside what the service vouches for; None for the system's own.

        Raises:
            SettingsError: If the file is no PEM file of certificates.
        """
        return None if self.tls_ca is None else self._context(None)

    def network(self) -> Network:
        """How sources are reached.

        Raises:
            SettingsError: If --proxy is no proxy.
        """
        return Network(
            proxies=proxies_of(self.proxy),
            sockets=self.sockets,
            allow_plain_http=self.allow_plain_http,
        )

    @property
    def sockets(self) -> SocketOptions:
        return SocketOptions(buffer_bytes=self.socket_buffer)

    def _context(self, pin: str | None) -> ssl.SSLContext:
        try:
            return client_context(self.tls_ca, pin)
        except SettingsError as error:
            raise SettingsError(f"--tls-ca {error}") from error


def parse_pin(option: str, text: str) -> str:
    """Raises:
    SettingsError: If it is no fingerprint.
    """
    try:
        return parse_fingerprint(text)
    except SettingsError as error:
        raise SettingsError(f"{option}: {error}") from error


def advertised_pin(text: str | None, *, advertise: str | None, tls_cert: Path | None) -> str | None:
    """Fingerprint of the certificate that targets will meet; None if there is none, or authorities vouch for it.

    Raises:
        SettingsError: If `text` is neither a fingerprint nor `none`, or --tls-cert holds no certificate.
    """
    if text is not None:
        return None if text == "none" else parse_pin("--advertise-pin", text)
    # Something that encrypts in front of a source in the clear has a certificate of its own, and the other way round.
    if tls_cert is None or (advertise is not None and not advertise.lower().startswith("https:")):
        return None
    return read_fingerprint(tls_cert)


def check_address(option: str, url: str) -> None:
    """Raises:
    SettingsError: If `url` is no HTTP address: a wrong option is wrong usage.
    """
    try:
        Address.parse(url)
    except RequestError as error:
        raise SettingsError(f"{option}: {error}") from error


def server_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """What https is served with, if it is.

    Raises:
        SettingsError: If one of the two is missing, or they are no certificate and its key.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise SettingsError("--tls-cert and --tls-key: one is given, expected both or none")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"--tls-cert {cert}, --tls-key {key}: {error}") from error
    return context
