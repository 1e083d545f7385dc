"""Names in paths: each is one segment, percent-encoded, so that `org%2Fname` means `org/name`."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote, quote_from_bytes, unquote, unquote_to_bytes

from fastapi import Path
from starlette.convertors import Convertor, register_url_convertor
from starlette.types import Scope

from weightwire.service.schemas import Name
from weightwire.transfer.errors import RequestError


class SegmentConvertor(Convertor[str]):
    """One segment of a path as `canonical_path` gives it; routes say `{name:segment}`."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value)

    def to_string(self, value: str) -> str:
        return quote(value, safe="")


# Routes find it by name, and take their parameters' types from here: so it is there before the first of them.
register_url_convertor("segment", SegmentConvertor())

InstanceId = Annotated[Name, Path(description="Percent-encoded as one segment")]
ModelId = Annotated[Name, Path(description="Percent-encoded as one segment")]
RankNumber = Annotated[int, Path(ge=0, le=2**63 - 1)]
TransferId = Annotated[str, Path(max_length=64)]


def canonical_path(scope: Scope) -> str:
    """The path of a request with each segment encoded in one way.

    ASGI's own `path` is decoded: in it `org%2Fname` has become two segments.

    Raises:
        RequestError: If a segment is not UTF-8.
    """
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    segments = [unquote_to_bytes(segment) for segment in raw.split(b"/")]
    try:
        for segment in segments:
            segment.decode()
    except UnicodeDecodeError as error:
        raise RequestError("path: is not percent-encoded UTF-8") from error
    return "/".join(quote_from_bytes(segment, safe="") for segment in segments)
