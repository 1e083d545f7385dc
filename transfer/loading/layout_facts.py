"""What decides the layout of a tree's shell besides dtype, shape and strides: its loader's cut, order and padding."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from weightwire.transfer.loading.casts import CastPolicy
from weightwire.transfer.loading.slots import ShellLoader


def layout_facts(loader: ShellLoader | None) -> dict[str, str]:
    """Facts for the layout fingerprint (L183): two shells of one shape are alike only if these are equal, too.

    Which dtypes a loader accepts leaves no trace in the shell, and is no fact.
    """
    held: object = loader
    own = getattr(held, "fingerprint_facts", None)
    facts = {str(key): str(value) for key, value in own().items()} if own is not None else {}
    if is_dataclass(held) and not isinstance(held, type):
        # What is left out of comparisons is the state of a load, not a fact about the layout.
        values = {field.name: getattr(held, field.name) for field in fields(held) if field.compare}
        plain = {name: str(value) for name, value in values.items() if not isinstance(value, CastPolicy)}
        facts = {**plain, **facts}
    return {"loader": type(loader).__name__ if loader is not None else "whole", **facts}
