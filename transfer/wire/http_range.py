"""The `Range` header of RFC 9110, section 14: one range of bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weightwire.transfer.errors import RequestError

_ONE_RANGE = re.compile(r"bytes=\s*([0-9]*)-([0-9]*)\s*", re.ASCII)
_MAX_DIGITS = 19


class UnsatisfiableRangeError(RequestError):
    """The range begins behind the end; answered 416 with the real length."""

    code = "range_unsatisfiable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes `begin` to `end`, the end not included."""

    begin: int
    end: int


def parse_range(header: str, nbytes: int) -> ByteRange | None:
    """The range that `header` asks for, of a body of `nbytes`.

    Returns:
        None where RFC 9110 lets a server answer with the whole: other units, several ranges, a malformed header.

    Raises:
        UnsatisfiableRangeError: If no byte of the body is in the range.
    """
    match = _ONE_RANGE.fullmatch(header.strip())
    if match is None or max(map(len, match.groups())) not in range(1, _MAX_DIGITS + 1):
        return None
    first, last = match.groups()
    if not first and not nbytes and int(last):
        # The last bytes of nothing: satisfiable, but no Content-Range can say so.
        return None
    if not first:
        begin, end = max(0, nbytes - int(last)), nbytes
    else:
        begin, end = int(first), min(nbytes, int(last) + 1) if last else nbytes
        if last and int(last) < int(first):
            return None
    if begin >= end:
        raise UnsatisfiableRangeError(f"range {header!r}: the body has {nbytes} bytes")
    return ByteRange(begin=begin, end=end)
