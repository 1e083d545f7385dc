"""The store that survives its process: one SQLite file."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weightwire.service.store import Transaction
from weightwire.transfer.errors import SettingsError, TransferError

SCHEMA_VERSION = 2
# Marks the file as ours, so that another program's database is refused and not written to. "wwir" in ASCII.
_APPLICATION_ID = 0x77776972
_BUSY_TIMEOUT_S = 2.0


class SqliteStore:
    """Entries in one table of one file.

    Journal: WAL with `synchronous=NORMAL`. A killed process loses nothing that was committed; a power cut may lose
    the last commits, which peers then send again (leases are renewed, progress is reported, requests are repeated),
    and spares the disk a flush for every lease. The file belongs to one process, by SQLite's own lock.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            SettingsError: If the file is in use, is no database of ours, is damaged or cannot be opened.
        """
        self._lock = threading.Lock()
        try:
            # It holds the key that tickets are signed with. SQLite gives its other files the same mode.
            path.touch(mode=0o600)
            self._connection = sqlite3.connect(
                path.absolute(), timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"store {str(path)!r}: cannot be opened: {error}", path=str(path)) from error
        try:
            self._prepare(path)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, path: Path) -> None:
        try:
            # The exclusive lock is taken by the first write and kept until the connection closes.
            self._connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute("BEGIN IMMEDIATE")
            self._check_schema(path)
            self._connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise SettingsError(
                    f"store {str(path)!r}: in use by another process, expected a file for this service alone",
                    path=str(path),
                ) from error
            raise SettingsError(f"store {str(path)!r}: cannot be opened: {error}", path=str(path)) from error
        except sqlite3.DatabaseError as error:
            raise SettingsError(f"store {str(path)!r}: damaged, or no database: {error}", path=str(path)) from error

    def _check_schema(self, path: Path) -> None:
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables == 0:
            self._connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            self._connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            self._connection.execute(
                "CREATE TABLE entries (kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, "
                "PRIMARY KEY (kind, key))"
            )
        elif application != _APPLICATION_ID:
            raise SettingsError(f"store {str(path)!r}: the database of another program", path=str(path))
        elif version != SCHEMA_VERSION:
            raise SettingsError(
                f"store {str(path)!r}: schema version {version}, expected {SCHEMA_VERSION}", path=str(path)
            )

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield _SqliteTransaction(self._connection)
                self._connection.execute("COMMIT")
            except BaseException as error:  # also the interrupt of a caller, and the end of its thread
                # A failed COMMIT may have ended the transaction already.
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise TransferError(f"store: {error}") from error
                raise

    def close(self) -> None:
        with self._lock:
            self._connection.close()


class _SqliteTransaction:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, kind: str, key: str) -> bytes | None:
        row = self._connection.execute("SELECT value FROM entries WHERE kind=? AND key=?", (kind, key)).fetchone()
        return None if row is None else bytes(row[0])

    def put(self, kind: str, key: str, value: bytes) -> None:
        self._connection.execute(
            "INSERT INTO entries VALUES (?, ?, ?) ON CONFLICT (kind, key) DO UPDATE SET value=excluded.value",
            (kind, key, value),
        )

    def delete(self, kind: str, key: str) -> None:
        self._connection.execute("DELETE FROM entries WHERE kind=? AND key=?", (kind, key))

    def scan(self, kind: str) -> list[tuple[str, bytes]]:
        return self._connection.execute("SELECT key, value FROM entries WHERE kind=? ORDER BY key", (kind,)).fetchall()
