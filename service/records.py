"""Values in a store: each kind of value is JSON under its key."""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import TypeAdapter

from weightwire.service.store import Transaction

Value = TypeVar("Value")


class Table(Generic[Value]):
    """The entries of one kind, as frozen dataclasses."""

    def __init__(self, kind: str, value: type[Value]) -> None:
        self._kind = kind
        # Reads dataclasses as well as models, and refuses an entry that is not of the type.
        self._codec = TypeAdapter(value)

    def get(self, transaction: Transaction, key: str) -> Value | None:
        text = transaction.get(self._kind, key)
        return None if text is None else self._codec.validate_json(text)

    def put(self, transaction: Transaction, key: str, value: Value) -> None:
        transaction.put(self._kind, key, self._codec.dump_json(value))

    def delete(self, transaction: Transaction, key: str) -> None:
        transaction.delete(self._kind, key)

    def scan(self, transaction: Transaction) -> list[Value]:
        """All values, ordered by key."""
        return [self._codec.validate_json(text) for _, text in transaction.scan(self._kind)]
