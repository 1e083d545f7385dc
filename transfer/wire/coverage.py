"""What of a target is verified, and by whom it was given."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.regions import Region
from weightwire.transfer.runs import runs_of
from weightwire.transfer.wire.stream import Endpoint, Place

# A strided region that is there in part is kept in mind by its runs; one of more comes whole again.
_MOST_RUNS = 1 << 14


class Coverage:
    """What is verified: flat bytes of the target, and of each source's manifest. Thread-safe.

    Attributes:
        target: Flat intervals of the shells that are verified.
        proven: By manifest digest, flat intervals of the source whose bytes hash to the manifest's own digests.
        bytes_by_source: Verified bytes by (instance, rank).
        on_verified: Told at once of places, and of the chunks of a manifest, by its digest, that they proved; from the
            streams' threads.
    """

    def __init__(self) -> None:
        self.target = IntervalSet()
        self.proven: dict[str, IntervalSet] = {}
        self.bytes_by_source: Counter[tuple[str, int]] = Counter()
        self.on_verified: Callable[[str, Sequence[Place], Sequence[int]], None] | None = None
        self._strided: dict[Region, list[tuple[Place, tuple[str, int]]]] = {}
        self._lock = threading.Lock()

    def add(
        self, places: Sequence[Place], chunks: Sequence[int], *, endpoint: Endpoint, chunk_bounds: Sequence[int]
    ) -> None:
        """Record places that are verified, and the chunks of the endpoint's manifest that this proved."""
        source = endpoint.instance_id, endpoint.rank
        with self._lock:
            for place in places:
                if place.is_contiguous:
                    self.bytes_by_source[source] += place.nbytes
                    self.target.add(*place.flat)
                else:
                    self._add_strided(place, source)
            proven = self.proven.setdefault(endpoint.manifest, IntervalSet())
            for chunk in chunks:
                proven.add(chunk_bounds[chunk], chunk_bounds[chunk + 1])
        if self.on_verified is not None:
            self.on_verified(endpoint.manifest, places, chunks)

    @property
    def given(self) -> dict[tuple[str, int], int]:
        """`bytes_by_source` as it is now."""
        with self._lock:
            return dict(self.bytes_by_source)

    def settle_partial(self) -> None:
        """At the end of a round: what is there of strided regions is kept, unless it is scattered too widely."""
        with self._lock:
            for region, pieces in self._strided.items():
                if len(runs_of(region)[0]) > _MOST_RUNS:
                    continue
                for place, source in pieces:
                    self.bytes_by_source[source] += place.nbytes
                    for box in region.packed(place.begin, place.end):
                        self.target.add_region(box)
            self._strided.clear()

    def _add_strided(self, place: Place, source: tuple[str, int]) -> None:
        # The bytes of a strided region interleave with its neighbours', so it counts when all of it is there.
        pieces = self._strided.setdefault(place.target, [])
        pieces.append((place, source))
        if sum(piece.nbytes for piece, _ in pieces) == place.target.numel:
            for piece, giver in self._strided.pop(place.target):
                self.bytes_by_source[giver] += piece.nbytes
            self.target.add_region(place.target)
