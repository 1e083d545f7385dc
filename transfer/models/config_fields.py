"""Typed access to the members of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from weightwire.transfer.checkpoint.untrusted_json import quoted
from weightwire.transfer.errors import ConfigError

# Where the text model of a larger one keeps its own settings.
_NESTED = "text_config"

Members: TypeAlias = Mapping[str, object]

# Each layer and expert becomes objects before its memory is asked about: a hostile number would never come to an end.
# Published models stay below 200 layers and 1,000 experts.
_MOST = {"num_hidden_layers": 4096, "num_experts": 65536, "num_local_experts": 65536, "n_routed_experts": 65536}
# Of anything else: the product of two sizes is a number that torch can count to.
_MOST_OF_A_SIZE = (1 << 31) - 1


class Fields:
    """Typed access to the members of a configuration; a null counts as absent, except that it is not left out."""

    def __init__(self, outer: Members, left_out: Members) -> None:
        self.outer = outer
        self.left_out = left_out
        nested = outer.get(_NESTED)
        if nested is not None and not isinstance(nested, Mapping):
            raise refusal(_NESTED, nested, "an object")
        self.nested: Members = nested if nested is not None else {}

    def find(self, *spellings: str) -> tuple[str, object]:
        """The first spelling that is there or has a value when left out, and its value; (the last one, None) if none.

        Raises:
            ConfigError: If two spellings on one level contradict each other.
        """
        for level in (self.nested, self.outer):
            present = [name for name in spellings if level.get(name) is not None]
            for name in present[1:]:
                if level[name] != level[present[0]]:
                    raise refusal(name, level[name], f"{quoted(level[present[0]])}, as {present[0]!r} says")
            if present:
                return present[0], level[present[0]]
        is_left_out = not any(name in level for level in (self.nested, self.outer) for name in spellings)
        known = [name for name in spellings if is_left_out and name in self.left_out]
        return (known[0], self.left_out[known[0]]) if known else (spellings[-1], None)

    def size(self, *spellings: str) -> int:
        found = self.optional_size(*spellings)
        if found is None:
            raise refusal(spellings[-1], None, "a positive integer")
        return found

    def optional_size(self, *spellings: str) -> int | None:
        name, value = self.find(*spellings)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise refusal(name, value, "a positive integer")
        most = _MOST.get(name, _MOST_OF_A_SIZE)
        if value > most:
            raise refusal(name, value, f"at most {most}")
        return value

    def optional_count(self, name: str) -> int | None:
        """A size that may be zero."""
        _, value = self.find(name)
        return 0 if value == 0 and not isinstance(value, bool) else self.optional_size(name)

    def text(self, name: str) -> str | None:
        _, value = self.find(name)
        if value is not None and not isinstance(value, str):
            raise refusal(name, value, "a text")
        return value

    def flag(self, name: str) -> bool | None:
        _, value = self.find(name)
        if value is not None and not isinstance(value, bool):
            raise refusal(name, value, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        _, value = self.find(name)
        if value is None:
            return ()
        if not isinstance(value, list) or any(not isinstance(item, int) or isinstance(item, bool) for item in value):
            raise refusal(name, value, "a list of integers")
        return tuple(value)


def refusal(field: str, value: object, expected: str) -> ConfigError:
    is_what = "missing" if value is None else quoted(value)
    return ConfigError(f"config.json: field {field!r} is {is_what}, expected {expected}", field=field)
