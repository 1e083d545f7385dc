"""Rates as people write them: 200MB, 1.5GiB/s, 100Mbit, unlimited."""

from __future__ import annotations

import re
from typing import Literal

from weightwire.transfer.errors import SettingsError
from weightwire.transfer.wire.pacing import MIN_BYTES_PER_S

_RATE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([a-z]*?)(?:/s)?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1.0, "b": 1.0, "bit": 1 / 8}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1e3**_power, f"{_letter}b": 1e3**_power, f"{_letter}ib": 1024.0**_power}
    _UNITS |= {f"{_letter}bit": 1e3**_power / 8}


def parse_rate(text: str, *, option: str) -> int | Literal["unlimited"]:
    """Bytes per second.

    Raises:
        SettingsError: If it is no rate, or one that looks like a dead source.
    """
    if text.lower() == "unlimited":
        return "unlimited"
    match = _RATE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise SettingsError(f"{option} {text!r}: expected bytes per second, such as 200MB or 100Mbit, or unlimited")
    rate = int(float(match[1]) * unit)
    if rate < MIN_BYTES_PER_S:
        raise SettingsError(
            f"{option} {text!r}: {rate} bytes per second look like a dead source, expected {MIN_BYTES_PER_S} at least; "
            "a limit of 0 readers lets nobody in"
        )
    return rate


def own_rate(text: str | None) -> int | None:
    """The rate that a source starts with; None is no limit.

    Raises:
        SettingsError: As `parse_rate`.
    """
    rate = "unlimited" if text is None else parse_rate(text, option="--max-rate")
    return None if rate == "unlimited" else rate
