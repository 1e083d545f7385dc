"""How much of a claim goes into one request. No I/O.

Servers that stand in front of a source limit the size of what passes: of requests (413), or of answers, which they
take whole from the source first and give up when that takes too long (502, 504). Nobody tells the limit beforehand, so
a stream finds it out, and keeps to it.
"""

from __future__ import annotations

import json
from collections import deque

from weightwire.transfer.errors import SourceRefusedError, TooLargeError, TransferError
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.regions import Region
from weightwire.transfer.wire.segments import Segment, cut_point, part_of

# Each time that something was too large the next is a quarter of it: five refusals lead from 8 MiB to 8 KiB.
_SHRINK = 4
_TOO_LARGE = 413
# What stands before a source does not get its answer.
GATEWAY_STATUSES = (502, 504)


class Portions:
    """Cuts claims into what one connection's requests may ask for at once.

    Attributes:
        request_bytes: Limit of a request's body that is known of; None as long as nothing was refused.
        answer_bytes: The same of the bytes that are asked for.
    """

    def __init__(self, manifest: Manifest, *, empty_request_bytes: int = 0) -> None:
        """Args:
        empty_request_bytes: Size of a request's body that asks for nothing.
        """
        self.request_bytes: int | None = None
        self.answer_bytes: int | None = None
        self._manifest = manifest
        self._empty_bytes = empty_request_bytes

    def take(self, waiting: deque[Segment]) -> list[Segment]:
        """Take as much as one request may ask for from the left of `waiting`; at least a piece of one segment."""
        if self.request_bytes is None and self.answer_bytes is None:
            taken = list(waiting)
            waiting.clear()
            return taken
        taken = []
        answer, request = 0, self._empty_bytes
        while waiting:
            self._cut_first(waiting, room=None if self.answer_bytes is None else self.answer_bytes - answer)
            answer += waiting[0].nbytes
            request += _size_of(waiting[0].source)
            if taken and (answer > (self.answer_bytes or answer) or request > (self.request_bytes or request)):
                break
            taken.append(waiting.popleft())
        return taken

    def learn(self, error: TransferError, refused: list[Segment], *, request_bytes: int) -> bool:
        """Whether what was refused is worth another try in smaller portions, which `take` gives from now on.

        Args:
            refused: What was asked for.
            request_bytes: Size of the request's body.
        """
        status = error.facts.get("status") if isinstance(error, SourceRefusedError) else None
        if isinstance(error, TooLargeError) or status == _TOO_LARGE:
            stated = error.facts.get("limit_bytes")
            limit = request_bytes // _SHRINK
            if isinstance(stated, int) and self._empty_bytes < stated < request_bytes:
                limit = stated
            self.request_bytes = limit
            return len(refused) > 1
        if status in GATEWAY_STATUSES:
            nbytes = sum(segment.nbytes for segment in refused)
            self.answer_bytes = max(nbytes // _SHRINK, self._manifest.chunk_bytes)
            return self.answer_bytes < nbytes
        return False

    def _cut_first(self, waiting: deque[Segment], *, room: int | None) -> None:
        """Cut the first segment if it alone is more than an answer may have, and what fits is worth it."""
        if room is None or waiting[0].nbytes <= max(room, self._manifest.chunk_bytes):
            return
        segment = waiting.popleft()
        size = cut_point(self._manifest, segment, room)
        parts = [part for ends in ((0, size), (size, segment.nbytes)) for part in part_of([segment], *ends)]
        waiting.extendleft(reversed(parts))


def _size_of(region: Region) -> int:
    """Bytes of a region in a request, and of the comma behind it."""
    return len(json.dumps(region.to_json(), separators=(",", ":"))) + 1
