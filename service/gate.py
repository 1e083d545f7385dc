"""What every request passes before its route: path, protocol version, token, body limit."""

from __future__ import annotations

import logging
import re

from sse_starlette.sse import SendTimeoutError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightwire.service.auth import Guard
from weightwire.service.bodies import read_body
from weightwire.service.error_handlers import problem_response
from weightwire.service.metrics import Metrics
from weightwire.service.paths import canonical_path
from weightwire.service.settings import Settings
from weightwire.transfer.errors import TransferError, VersionSkewError
from weightwire.transfer.wire.framing import PROTOCOL

PROTOCOL_HEADER = "Weightwire-Protocol"
_VERSION = re.compile(r"(\d{1,9})\.\d{1,9}", re.ASCII)
_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})
# Routes that read their own body: it may be large, and is unpacked and parsed in a thread.
_LARGE = re.compile(r"/v1/instances/[^/]+/ranks/[^/]+/manifest|/v1/plans")

logger = logging.getLogger(__name__)


class Gate:
    """ASGI middleware that refuses what no route should see, and answers what no route should have raised."""

    def __init__(self, app: ASGIApp, *, settings: Settings, guard: Guard, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._guard = guard
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_versioned(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[PROTOCOL_HEADER] = PROTOCOL
            await send(message)

        try:
            admitted, receive_admitted = await self._admitted(scope, receive)
            await self._app(admitted, receive_admitted, send_versioned)
        except (ClientDisconnect, SendTimeoutError):
            logger.info("%s %s: the client went away", scope["method"], scope["path"])
        except TransferError as error:
            await self._answer(error, scope, receive, send_versioned)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            # Half an answer cannot become a problem document; the server cuts the connection.
            if started:
                raise
            failure = TransferError("request: failed inside the service; its log says why")
            await self._answer(failure, scope, receive, send_versioned)

    async def _admitted(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        """The request as its route sees it.

        Raises:
            TransferError: If it goes no further.
        """
        headers = Headers(scope=scope)
        scope = {**scope, "path": canonical_path(scope)}
        _check_protocol(headers.get(PROTOCOL_HEADER))
        # Before the body is read: a stranger must not fill the memory.
        authorization = dict(scope["headers"]).get(b"authorization")
        self._guard.check(authorization, method=scope["method"], path=scope["path"])
        if scope["method"] not in _WITH_BODY or _LARGE.fullmatch(scope["path"]):
            return scope, receive
        body = await read_body(
            receive,
            headers,
            limit_bytes=self._settings.max_body_bytes,
            timeout_s=self._settings.body_timeout_s,
        )
        return scope, _replay(body, receive)

    async def _answer(self, error: TransferError, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.error_seen(error.code)
        await problem_response(error)(scope, receive, send)


def _check_protocol(stated: str | None) -> None:
    if stated is None:
        return
    match = _VERSION.fullmatch(stated.strip())
    major = PROTOCOL.partition(".")[0]
    if match is None or int(match[1]) != int(major):
        raise VersionSkewError(f"protocol version {stated!r}: not spoken here, expected {major}.x", supported=PROTOCOL)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the body again, then what the connection says."""
    waiting = [body]

    async def replayed() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replayed
