"""Scales that the checkpoint names otherwise than the shells: of the KV cache, and of weights in blocks."""

from __future__ import annotations

from collections.abc import Container

# The attention layer of a module; multi-head latent attention keeps it under the second name.
_ATTENTION = ("attn", "attn_mqa")
_WEIGHT_SCALE = "weight_scale"


def is_kv_scale(name: str) -> bool:
    """Whether `name` is a scale of queries, keys or values in the cache, in any of its spellings."""
    return _kv_scale(name) is not None


def kv_scale_targets(name: str, shell_names: Container[str]) -> tuple[str, ...]:
    """The shells that a KV-cache scale fills.

    Returns:
        Runtime names: none if this model has no such scale, two (of keys and of values) for the old `kv_scale`.
    """
    found = _kv_scale(name)
    if found is None:
        return ()
    module, letters = found
    targets = []
    for letter in letters:
        spellings = (".".join((*module, attention, f"{letter}_scale")) for attention in _ATTENTION)
        targets += [target for target in spellings if target in shell_names][:1]
    return tuple(targets)


def _kv_scale(name: str) -> tuple[list[str], str] | None:
    """Components of the module that has the attention layer, and the letters of the scales."""
    match name.split("."):
        case [*module, "k_proj" | "v_proj" as projection, "k_scale" | "v_scale" as leaf] if projection[0] == leaf[0]:
            return module, leaf[0]
        case [*module, "q_proj" | "k_proj" | "v_proj" as projection, "output_scale"]:
            return module, projection[0]
        case [*module, "attn" | "attn_mqa", "k_scale" | "v_scale" as leaf]:
            return module, leaf[0]
        case [*module, "k_scale" | "v_scale" as leaf]:
            return module, leaf[0]
        case [*module, "kv_scale"]:
            return module, "kv"
    return None


def block_scale_target(name: str, shell_names: Container[str]) -> str | None:
    """The shell `...weight_scale_inv` for a `...weight_scale` that has none: Quark names block scales so."""
    inverse = f"{name}_inv"
    if name.endswith(_WEIGHT_SCALE) and name not in shell_names and inverse in shell_names:
        return inverse
    return None


def resolve_scale(name: str, shell_names: Container[str]) -> str | None:
    """The shell of a scale that is named otherwise there; the first one, if there are several."""
    targets = kv_scale_targets(name, shell_names)
    return targets[0] if targets else block_scale_target(name, shell_names)
