"""Stores: atomic, serialised, rolled back; the SQLite file belongs to one service and survives it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from weightwire.service.sqlite_store import SCHEMA_VERSION, SqliteStore
from weightwire.service.store import MemoryStore, Store
from weightwire.transfer.errors import SettingsError, TransferError

OpenStore: TypeAlias = Callable[[Path], Store]
STORES = [
    pytest.param(lambda path: MemoryStore(), id="in memory"),
    pytest.param(lambda path: SqliteStore(path / "s.db"), id="in a SQLite file"),
]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    open_store: OpenStore = request.param
    opened = open_store(tmp_path)
    yield opened
    opened.close()


def test_store_keeps_what_a_transaction_wrote(store: Store) -> None:
    with store.transaction() as transaction:
        transaction.put("k", "b", b"2")
        transaction.put("k", "a", b"1")
        transaction.put("k", "a", b"\x00\xff")
        transaction.put("other", "a", b"3")
        assert transaction.get("k", "a") == b"\x00\xff"
    with store.transaction() as transaction:
        assert transaction.scan("k") == [("a", b"\x00\xff"), ("b", b"2")]
        assert transaction.get("k", "c") is None
        transaction.delete("k", "a")
        transaction.delete("k", "never there")
        assert transaction.scan("k") == [("b", b"2")]
    with store.transaction() as transaction:
        assert transaction.get("k", "a") is None
        assert transaction.scan("nothing") == []


def test_store_forgets_what_a_failed_transaction_did(store: Store) -> None:
    with store.transaction() as transaction:
        transaction.put("k", "a", b"1")

    def fail() -> None:
        with store.transaction() as transaction:
            transaction.put("k", "a", b"2")
            transaction.put("k", "b", b"2")
            transaction.delete("k", "a")
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fail()
    with store.transaction() as transaction:
        assert transaction.scan("k") == [("a", b"1")]


def test_transactions_of_many_threads_run_one_after_the_other(store: Store) -> None:
    def count() -> None:
        for _ in range(50):
            with store.transaction() as transaction:
                seen = int(transaction.get("k", "n") or b"0")
                transaction.put("k", "n", str(seen + 1).encode())

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.transaction() as transaction:
        assert transaction.get("k", "n") == b"200"


def test_sqlite_store_keeps_its_entries_when_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "odd name ü.db"
    first = SqliteStore(path)
    with first.transaction() as transaction:
        transaction.put("k", "org/näme 'quoted\"", b"x" * 1_000_000)
    first.close()
    second = SqliteStore(path)
    with second.transaction() as transaction:
        assert transaction.scan("k") == [("org/näme 'quoted\"", b"x" * 1_000_000)]
    second.close()


def test_sqlite_store_refuses_a_second_opener_in_the_same_process(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "s.db")
    with pytest.raises(SettingsError, match="in use by another process"):
        SqliteStore(tmp_path / "s.db")
    first.close()
    SqliteStore(tmp_path / "s.db").close()


HOLDER = """
import sys
from pathlib import Path
from weightwire.service.sqlite_store import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
with store.transaction() as transaction:
    transaction.put("k", "committed", b"1")
manager = store.transaction()
transaction = manager.__enter__()
transaction.put("k", "open", b"1")
print("holding", flush=True)
sys.stdin.read()
"""


def test_sqlite_store_of_a_killed_process_has_what_was_committed_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        with pytest.raises(SettingsError, match="in use by another process"):
            SqliteStore(path)
        holder.kill()
    store = SqliteStore(path)
    with store.transaction() as transaction:
        assert transaction.scan("k") == [("committed", b"1")]
    store.close()


def test_sqlite_store_refuses_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_bytes(b"not a database, and longer than a header would be" * 40)
    with pytest.raises(SettingsError, match=r"s\.db'?: damaged, or no database"):
        SqliteStore(tmp_path / "s.db")


def test_sqlite_store_refuses_a_damaged_database(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = SqliteStore(path)
    with store.transaction() as transaction:
        for number in range(100):
            transaction.put("k", str(number), b"x" * 1000)
    store.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    with pytest.raises(SettingsError, match="damaged"):
        SqliteStore(path)


def test_sqlite_store_refuses_the_database_of_another_program(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "s.db") as other:
        other.execute("CREATE TABLE entries (x)")
    other.close()
    with pytest.raises(SettingsError, match="another program"):
        SqliteStore(tmp_path / "s.db")


def test_sqlite_store_refuses_another_schema_version(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "s.db").close()
    with sqlite3.connect(tmp_path / "s.db") as newer:
        newer.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    newer.close()
    with pytest.raises(SettingsError, match=f"schema version {SCHEMA_VERSION + 1}, expected {SCHEMA_VERSION}"):
        SqliteStore(tmp_path / "s.db")


def test_sqlite_store_refuses_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be opened"):
        SqliteStore(tmp_path / "no such folder" / "s.db")


def test_sqlite_store_that_was_closed_says_so_as_an_error_of_ours(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    store.close()
    with pytest.raises(TransferError, match=r"^store: "), store.transaction():
        pass


def test_sqlite_store_is_for_its_owner_alone(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    with store.transaction() as transaction:
        transaction.put("k", "a", b"1")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    store.close()
    assert modes == {"s.db": 0o600, "s.db-wal": 0o600}
