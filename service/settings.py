"""What the service can be told: read once, at start, and passed down as a value."""

from __future__ import annotations

import difflib
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from weightwire.transfer.address import Address, bare_host, check_zone, is_loopback
from weightwire.transfer.errors import RequestError, SettingsError
from weightwire.transfer.wire.proxies import Proxies

PREFIX = "WEIGHTWIRE_"
_SQLITE = "sqlite:"
Seconds = Annotated[float, Field(gt=0, le=10 * 365 * 86400)]
Limit = Annotated[int, Field(ge=1)]


class Settings(BaseSettings):
    """Everything the control plane can be told.

    Attributes:
        host: Address to bind; a name or an IP literal without brackets.
        port: Port to bind; 0 takes any free one.
        advertise: URL that others connect to; the bound address by default.
        store: `memory`, or `sqlite:PATH`.
        token: Admin token: opens everything.
        read_token: Opens what only reads.
        lease_s: Lease of a rank that asks for none of its own.
        lease_grace_s: Least time that leases are good for after the service starts; `lease_s` by default.
        tls_cert: PEM file with the certificate chain.
        tls_key: PEM file with its key.
        allow_plain_http: Lets tokens and tickets travel unencrypted beyond loopback.
        max_manifest_bytes: Limit of a manifest, compressed or not.
        max_body_bytes: Limit of every other request body.
        body_timeout_s: Time that a request body may take to arrive.
        ready_timeout_s: Time that the store may take before the service says that it is not ready.
        drain_s: Time that open requests get when the service stops.
        sweep_s: Interval at which leases, deadlines and leftovers are looked at.
        keep_transfers_s: How long ended transfers are remembered.
        keep_manifests_s: How long a manifest stays that nobody refers to.
        keep_instances_s: How long an instance is remembered after its last lease ran out.
        quarantine_s: How long a source is kept from targets after damaged bytes.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8700, ge=0, le=65535)
    advertise: str | None = None
    store: str = "memory"
    token: SecretStr | None = None
    read_token: SecretStr | None = None
    lease_s: Seconds = 15.0
    lease_grace_s: Seconds | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allow_plain_http: bool = False
    max_manifest_bytes: Limit = 256 << 20
    max_body_bytes: Limit = 1 << 20
    body_timeout_s: Seconds = 300.0
    ready_timeout_s: Seconds = 2.0
    drain_s: Annotated[int, Field(ge=1)] = 10
    sweep_s: Seconds = 1.0
    keep_transfers_s: Seconds = 86400.0
    keep_manifests_s: Seconds = 3600.0
    keep_instances_s: Seconds = 3600.0
    quarantine_s: Seconds = 600.0

    @field_validator("host")
    @classmethod
    def _without_brackets(cls, host: str) -> str:
        return bare_host(host)

    @property
    def sqlite_path(self) -> Path | None:
        """The database file, or None for the store in memory."""
        return Path(self.store.removeprefix(_SQLITE)) if self.store.startswith(_SQLITE) else None

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    @property
    def grace_s(self) -> float:
        return self.lease_s if self.lease_grace_s is None else self.lease_grace_s


# Variables with our prefix that other commands read (the CLI's flags); the service itself does not look at them.
KNOWN_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        "ADVERTISE_PIN",
        "CHECKPOINT",
        "DEADLINE_S",
        "EPOCH",
        "FIRST_BYTE_S",
        "INSTANCE_ID",
        "MAX_RATE",
        "MAX_READERS",
        "MIN_RATE",
        "MODEL",
        "PROXY",
        "REVISION",
        "SERVER_PROCESS",
        "SERVICE",
        "SERVICE_PIN",
        "SOCKET_BUFFER",
        "STAGING",
        "STALL_WINDOW_S",
        "STREAMS",
        "TLS_CA",
    )
)


def load_settings(overrides: Mapping[str, object] | None = None) -> Settings:
    """Settings from the environment; `overrides` (from flags, None where not given) win.

    Raises:
        SettingsError: If a variable with our prefix is unknown, or a value cannot be right.
    """
    check_environment()
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        wrong = "; ".join(f"{PREFIX}{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors())
        raise SettingsError(f"settings: {wrong}") from None
    check_settings(settings)
    return settings


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Refuse variables that have our prefix and no meaning: a misspelt one must not be ignored.

    Args:
        environ: The process's own by default.

    Raises:
        SettingsError: Naming each such variable.
    """
    environ = os.environ if environ is None else environ
    known = KNOWN_VARIABLES | {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for name in sorted(environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.85)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {sorted(known)}"
            raise SettingsError(f"variable {name}: unknown; {hint}", variable=name)


def proxies_of(rule: str) -> Proxies:
    """What `--proxy` says: `none`, a URL, or `env` for the variables that most programs know.

    Raises:
        SettingsError: If it is none of these, or a variable names what is no proxy.
    """
    try:
        return Proxies.parse(rule, os.environ)
    except SettingsError as error:
        raise SettingsError(f"--proxy{' env' if rule == 'env' else ''}: {error}") from error


def check_settings(settings: Settings) -> None:
    """Refuse what contradicts itself, and what would leave the service open to the network.

    Raises:
        SettingsError: Before anything is bound.
    """
    if settings.store != "memory" and (settings.sqlite_path is None or settings.store == _SQLITE):
        raise SettingsError(f"store {settings.store!r}: expected 'memory' or 'sqlite:PATH'")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise SettingsError("tls: one of tls_cert and tls_key is set, expected both or none")
    for path in (settings.tls_cert, settings.tls_key):
        if path is not None and not path.is_file():
            raise SettingsError(f"tls: {path} is not a file")
    if settings.tls_cert is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
        except OSError as error:
            raise SettingsError(f"tls: {settings.tls_cert} and {settings.tls_key}: {error}") from error
    if settings.advertise is not None:
        try:
            Address.parse(settings.advertise)
        except RequestError as error:
            raise SettingsError(f"advertise: {error}") from error
    check_zone(settings.host, advertise=settings.advertise)
    _check_tokens(settings)
    _check_exposure(settings)


def _check_tokens(settings: Settings) -> None:
    for name in ("token", "read_token"):
        secret: SecretStr | None = getattr(settings, name)
        # A token that is set to nothing is a mistake: taken for no token it would open the service.
        text = None if secret is None else secret.get_secret_value()
        if text is not None and not (text.isascii() and text.isprintable() and text and " " not in text):
            raise SettingsError(f"{name}: empty, or holds blanks or characters outside ASCII")
    if settings.read_token is not None and settings.token is None:
        raise SettingsError("read_token: set without token; nobody could register an instance")
    if settings.token is not None and settings.token == settings.read_token:
        raise SettingsError("read_token: equal to token; a reader would be an administrator")


def _check_exposure(settings: Settings) -> None:
    if is_loopback(settings.host):
        return
    if settings.token is None:
        raise SettingsError(
            f"host {settings.host!r}: not loopback, and no token is set; expected --token or WEIGHTWIRE_TOKEN"
        )
    if settings.tls_cert is None and not settings.allow_plain_http:
        raise SettingsError(
            f"host {settings.host!r}: tokens would travel over plain HTTP; expected --tls-cert and --tls-key, "
            "or --allow-plain-http"
        )
