"""Manifests by digest: each is stored once, packed, and kept as long as something refers to it."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from weightwire.service.records import Table
from weightwire.service.store import Store, Transaction
from weightwire.transfer.errors import ManifestError, NotFoundError
from weightwire.transfer.manifest import Manifest, Topology

_TEXT = "manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFacts:
    """What the service knows of a stored manifest without reading it.

    Attributes:
        nbytes: Bytes of the storages that it describes.
        unused_since: When the last reference went; None while something refers to it.
    """

    digest: str
    model: str
    revision: str
    topology: Topology
    rank: int
    nbytes: int
    unused_since: float | None = None


_FACTS = Table("manifest_facts", ManifestFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedManifest:
    """A manifest ready to be stored: its facts, and its canonical text as gzip."""

    facts: ManifestFacts
    blob: bytes

    @classmethod
    def of(cls, manifest: Manifest, *, digest: str) -> PackedManifest:
        """Pack a manifest; takes a while for a large one.

        Raises:
            ManifestError: If it has another digest.
        """
        if manifest.digest != digest:
            raise ManifestError(f"manifest: its canonical text hashes to {manifest.digest}, announced as {digest}")
        facts = ManifestFacts(
            digest=digest,
            model=manifest.model,
            revision=manifest.revision,
            topology=manifest.topology,
            rank=manifest.rank,
            nbytes=manifest.total_bytes,
        )
        # Without a time stamp, so that equal manifests are stored as equal bytes.
        return cls(facts=facts, blob=gzip.compress(manifest.text, mtime=0))


class Manifests:
    """The manifests of a store. Methods without a transaction make their own, and may block."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def refer(self, transaction: Transaction, digest: str, packed: PackedManifest | None) -> tuple[ManifestFacts, bool]:
        """Keep a manifest because something refers to it from now on; `packed` is stored if it is not known.

        Returns:
            Its facts, and True if it was new.

        Raises:
            NotFoundError: If it is not known and has not come along.
        """
        known = _FACTS.get(transaction, digest)
        if known is not None:
            _mark_used(transaction, known)
            return known, False
        if packed is None:
            raise NotFoundError(f"manifest {digest}: not known, send it", kind="manifest", name=digest)
        transaction.put(_TEXT, digest, packed.blob)
        _FACTS.put(transaction, digest, packed.facts)
        return packed.facts, True

    def packed_text(self, digest: str) -> bytes:
        """The canonical text of a manifest, as gzip.

        Raises:
            NotFoundError: If it is not known.
        """
        with self._store.transaction() as transaction:
            blob = transaction.get(_TEXT, digest)
        if blob is None:
            raise NotFoundError(f"manifest {digest}: not known", kind="manifest", name=digest)
        return blob

    def read(self, digest: str) -> Manifest:
        """One manifest; takes a while for a large one.

        Raises:
            NotFoundError: If it is not known.
        """
        return Manifest.from_text(gzip.decompress(self.packed_text(digest)))

    def forget_unused(self, *, keep_s: float, used: Iterable[str]) -> None:
        """Drop manifests that nothing has referred to for `keep_s`.

        Args:
            used: Digests of those that something refers to now.
        """
        now = self._clock()
        with self._store.transaction() as transaction:
            kept = set(used)
            for facts in _FACTS.scan(transaction):
                if facts.digest in kept:
                    _mark_used(transaction, facts)
                elif facts.unused_since is None:
                    _FACTS.put(transaction, facts.digest, replace(facts, unused_since=now))
                elif facts.unused_since + keep_s <= now:
                    _FACTS.delete(transaction, facts.digest)
                    transaction.delete(_TEXT, facts.digest)


def _mark_used(transaction: Transaction, facts: ManifestFacts) -> None:
    if facts.unused_since is not None:
        _FACTS.put(transaction, facts.digest, replace(facts, unused_since=None))
