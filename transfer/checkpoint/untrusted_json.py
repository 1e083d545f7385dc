"""JSON that a stranger wrote: parsed as strictly as the safetensors library does, quoted safely."""

from __future__ import annotations

import json
import reprlib

from weightwire.transfer.errors import CheckpointError

_QUOTE = reprlib.Repr()
_QUOTE.maxstring = 500
_QUOTE.maxlist = _QUOTE.maxtuple = 12

# serde_json's u64 has at most twenty digits; longer numbers are floats to it, and so is -0.
_MAX_DIGITS = 20


def quoted(value: object) -> str:
    """The `repr` of a stranger's value, cut to a length that fits one line of a log."""
    return _QUOTE.repr(value)


def parse_object(raw: bytes, *, subject: str, refusal: type[CheckpointError] = CheckpointError) -> dict[str, object]:
    """Parse UTF-8 JSON that must be one object, without duplicate keys at any depth.

    Args:
        raw: The text. Parsing takes up to some twenty-five times its length in memory.
        subject: What the text is, for the message: `file '/m/config.json'`.
        refusal: The error class to raise.

    Raises:
        CheckpointError: As `refusal`, if the text is anything else.
    """
    try:
        value: object = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_int=_integer, parse_constant=_refuse_constant
        )
    except RecursionError as error:
        raise refusal(f"{subject}: JSON is nested too deeply") from error
    except ValueError as error:
        raise refusal(f"{subject}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise refusal(f"{subject}: JSON is a {type(value).__name__}, expected an object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen = set[str]()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {quoted(key)} occurs twice in one object")
            seen.add(key)
    return members


def _integer(text: str) -> int | float:
    return float(text) if len(text) > _MAX_DIGITS or text == "-0" else int(text)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
