"""Where the control plane keeps its state: one `Store` protocol, and the one in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Transaction(Protocol):
    """Reads and writes that become true together, or not at all. Good only inside its `with` block."""

    def get(self, kind: str, key: str) -> bytes | None: ...

    def put(self, kind: str, key: str, value: bytes) -> None: ...

    def delete(self, kind: str, key: str) -> None:
        """Remove a key; one that is not there is no error."""
        ...

    def scan(self, kind: str) -> list[tuple[str, bytes]]:
        """All entries of a kind, ordered by key."""
        ...


class Store(Protocol):
    """Entries of bytes under (kind, key). Transactions of all threads run one after the other."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Begin a transaction: commits at the end of the block, rolls back if the block raises.

        Not to be nested. Raises `TransferError` if the store does not work.
        """
        ...

    def close(self) -> None: ...


class MemoryStore:
    """A store that ends with its process."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, bytes]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with self._lock:
            # What raises does not come to the commit, and nothing has been touched yet.
            transaction = _MemoryTransaction(self._kinds)
            yield transaction
            transaction.commit()

    def close(self) -> None:
        return


class _MemoryTransaction:
    def __init__(self, kinds: dict[str, dict[str, bytes]]) -> None:
        self._kinds = kinds
        # What this transaction wrote; None marks a deletion. The shared dicts change at the commit only.
        self._written: dict[tuple[str, str], bytes | None] = {}

    def get(self, kind: str, key: str) -> bytes | None:
        if (kind, key) in self._written:
            return self._written[kind, key]
        return self._kinds.get(kind, {}).get(key)

    def put(self, kind: str, key: str, value: bytes) -> None:
        self._written[kind, key] = value

    def delete(self, kind: str, key: str) -> None:
        self._written[kind, key] = None

    def scan(self, kind: str) -> list[tuple[str, bytes]]:
        entries: dict[str, bytes | None] = dict(self._kinds.get(kind, {}))
        entries.update({key: value for (of, key), value in self._written.items() if of == kind})
        return sorted((key, value) for key, value in entries.items() if value is not None)

    def commit(self) -> None:
        for (kind, key), value in self._written.items():
            entries = self._kinds.setdefault(kind, {})
            if value is None:
                entries.pop(key, None)
            else:
                entries[key] = value
