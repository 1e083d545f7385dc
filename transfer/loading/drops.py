"""Which checkpoint tensors a rank leaves aside, each told by its name alone.

A number is compared as a number and a path component by component: layer 1 is not the beginning of layer 10.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

DECODER = "model.layers"

# The tables come from the formula; old files carry them all the same.
ROTARY_CACHES = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)

_INDEXER = ".indexer."
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


def is_within(name: str, path: str) -> bool:
    """Whether `name` is `path` or lies below it; a dot at the end of `path` changes nothing."""
    path = path.removesuffix(".")
    return name == path or name.startswith(f"{path}.")


def select_layers(paths: Collection[str]) -> Callable[[str], bool]:
    """A predicate for names within any of the paths, such as `model.layers.1`; the paths are text, not patterns."""
    return lambda name: any(is_within(name, path) for path in paths)


def is_rotary_cache(name: str) -> bool:
    """Needs nothing but the name."""
    return any(cache in name for cache in ROTARY_CACHES)


def indexer_owners(shell_names: Iterable[str]) -> frozenset[str]:
    """Paths of the modules that have an indexer for sparse attention."""
    return frozenset(_before_indexer(name) for name in shell_names if _INDEXER in f".{name}")


def is_foreign_indexer(name: str, owners: Collection[str]) -> bool:
    """Whether `name` is a tensor of an indexer that this model does not have. Needs the shells."""
    return _INDEXER in f".{name}" and _before_indexer(name) not in owners


def _before_indexer(name: str) -> str:
    return f".{name}".partition(_INDEXER)[0].removeprefix(".")


def layer_of(name: str, decoder: str = DECODER) -> int | None:
    """Number of the decoder layer that a tensor belongs to.

    Args:
        name: Checkpoint name.
        decoder: Path of the decoder's list of layers. A vision tower has layers too, and they are not meant.
    """
    if not name.startswith(f"{decoder}."):
        return None
    number = name[len(decoder) + 1 :].partition(".")[0]
    return int(number) if _NUMBER.fullmatch(number) else None


def is_off_stage(name: str, layers: range, *, decoder: str = DECODER) -> bool:
    """Whether the tensor's layer lies outside of `layers`; without a layer it does not. Needs the layer's number."""
    layer = layer_of(name, decoder)
    return layer is not None and layer not in layers


def on_stage(pairs: Iterable[tuple[str, T]], layers: range, *, decoder: str = DECODER) -> Iterator[tuple[str, T]]:
    """Lazily pass the pairs of one pipeline stage, and those without a layer."""
    return (pair for pair in pairs if not is_off_stage(pair[0], layers, decoder=decoder))


def is_foreign_final_norm(name: str, final_norm: str, *, owned: bool) -> bool:
    """Whether `name` is the model's final norm, on a stage without it. Needs to know which stage is the last.

    Args:
        name: Checkpoint name.
        final_norm: Path of the module, as `model.norm`. Norms inside of layers have other paths.
        owned: Whether this stage has it.
    """
    return not owned and is_within(name, final_norm)
