"""Request bodies: read with a limit and a deadline, and unpacked no further than the limit."""

from __future__ import annotations

import asyncio
import zlib

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from weightwire.transfer.errors import DeadlineError, RequestError, TooLargeError

_GZIP_WINDOW = 31


async def read_body(receive: Receive, headers: Headers, *, limit_bytes: int, timeout_s: float) -> bytes:
    """Read a whole body as it came.

    Of a body that is too large the rest is read and dropped, up to as much again, since a client that still sends
    would not see the answer.

    Raises:
        TooLargeError: If it is larger than `limit_bytes`.
        DeadlineError: If it takes longer than `timeout_s`.
    """
    # What says of itself that it is far too large is not worth reading.
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > 2 * limit_bytes:
        raise too_large(limit_bytes)
    parts = bytearray()
    dropped = 0
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more and dropped <= limit_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                more = message.get("more_body", False)
                piece = message.get("body", b"")
                if dropped or len(parts) + len(piece) > limit_bytes:
                    dropped += len(piece)
                else:
                    parts += piece
    except TimeoutError as error:
        raise DeadlineError(f"request body: not complete after {timeout_s:g} s") from error
    if dropped:
        raise too_large(limit_bytes)
    return bytes(parts)


def unpack(body: bytes, *, encoding: str, limit_bytes: int) -> bytes:
    """Undo a Content-Encoding; may take a while.

    Raises:
        TooLargeError: If more than `limit_bytes` would come out; no more than that is ever unpacked.
        RequestError: If the encoding is not known, or the body is not encoded so.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise RequestError(f"request body: Content-Encoding is {encoding!r}, expected gzip or none")
    inflater = zlib.decompressobj(_GZIP_WINDOW)
    try:
        # One byte more than allowed, so that too much can be told from just enough.
        text = inflater.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise RequestError(f"request body: is not gzip: {error}") from error
    if len(text) > limit_bytes:
        raise too_large(limit_bytes)
    if not inflater.eof or inflater.unused_data:
        raise RequestError("request body: expected one complete gzip member and nothing after it")
    return text


def too_large(limit_bytes: int) -> TooLargeError:
    return TooLargeError(f"request body: more than {limit_bytes} bytes", limit_bytes=limit_bytes)
