"""Bodies as large as a manifest: read on the event loop, unpacked and parsed in a thread."""

from __future__ import annotations

from typing import TypeVar

import anyio.to_thread
from fastapi import Request
from pydantic import BaseModel, ValidationError

from weightwire.service.bodies import read_body, unpack
from weightwire.service.components import Components
from weightwire.service.error_handlers import request_error

Body = TypeVar("Body", bound=BaseModel)


async def read_large_body(request: Request, kind: type[Body], parts: Components) -> Body:
    """Read a JSON body that may be gzip.

    Raises:
        TooLargeError: If it is larger than a manifest may be, packed or not.
        DeadlineError: If it does not arrive in time.
        RequestError: If it is not of this kind.
    """
    settings = parts.settings
    packed = await read_body(
        request.receive,
        request.headers,
        limit_bytes=settings.max_manifest_bytes,
        timeout_s=settings.body_timeout_s,
    )
    encoding = request.headers.get("content-encoding", "").strip().lower()

    def parse() -> Body:
        text = unpack(packed, encoding=encoding, limit_bytes=settings.max_manifest_bytes)
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            raise request_error([(item["loc"], item["msg"]) for item in error.errors()]) from None

    # In a thread, though C code parses: the event loop gets its turns between unpacking, parsing and checking.
    return await anyio.to_thread.run_sync(parse, limiter=parts.heavy_work)


def large_body_schema(kind: type[BaseModel]) -> dict[str, object]:
    """What OpenAPI says of a body that FastAPI does not read itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}
