"""Serves the ranks of a target while they are being filled, where they will hold exactly what a source holds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from weightwire.transfer.adoption import adoptable
from weightwire.transfer.errors import FencedError
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.held import Held
from weightwire.transfer.wire.source import Source

logger = logging.getLogger(__name__)


class Relay:
    """The data plane of a target from the moment it registers until it is filled or has failed.

    Readers that come before it knows its shells are asked to come back in a moment.
    """

    def __init__(self, sources: Mapping[int, Source]) -> None:
        """Args:
        sources: By rank; nothing is published by them yet.
        """
        self._sources = sources
        self._held: dict[int, Held] = {}
        for source in sources.values():
            source.expect()

    def begin(
        self, shells: Shells, layout: Manifest, manifests: Iterable[Manifest], *, weight_version: int
    ) -> Held | None:
        """Serve a rank from now on, if one of the manifests is what it will hold; else refuse its readers.

        Args:
            shells: About to be filled.
            layout: Their manifest, with the model's identity.
            manifests: What the sources hold, best first.

        Returns:
            What the filling has to tell of verified bytes; None if the rank is not served.
        """
        source = self._sources[layout.rank]
        manifest = adoptable(layout, manifests)
        if manifest is None:
            logger.info("%s serves when it is filled: no source holds exactly what it will hold", source)
            source.decline("its layout is that of no source: it serves once it is filled")
            return None
        held = self._held[layout.rank] = Held(shells, manifest)
        source.publish_partial(shells, held, weight_version=weight_version)
        return held

    def adopted(self, rank: int) -> Manifest | None:
        """The manifest under which a filled rank is served already; None if it is not."""
        held = self._held.get(rank)
        return held.manifest if held is not None and held.is_complete else None

    def decline(self, why: str) -> None:
        """Serve nothing, and let all readers go, until something is published."""
        for source in self._sources.values():
            source.decline(why)
        for held in self._held.values():
            held.fail(FencedError(why))
        self._held.clear()
