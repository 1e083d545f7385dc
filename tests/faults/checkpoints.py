"""Checkpoints with known bytes, written and read without the code under test."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import safetensors

MIB = 1 << 20
# Source: safetensors 0.8, README "Format".
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F4": 4, "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """One tensor as a file has it.

    Attributes:
        tag: Dtype, as in a safetensors header.
        shape: As in the header: of logical values.
        data: Row-major bytes.
    """

    tag: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)


def content(tag: str, *shape: int, seed: int = 0) -> Content:
    """A tensor of random bits, the same for the same arguments: NaNs with payloads and denormals come along."""
    nbytes = math.prod(shape) * BITS[tag] // 8
    data = np.random.default_rng([seed, *tag.encode(), *shape]).bytes(nbytes)
    return Content(tag=tag, shape=shape, data=bytes(byte & 1 for byte in data) if tag == "BOOL" else data)


def write_file(path: Path, tensors: Mapping[str, Content]) -> None:
    """Write one safetensors file, tensors in the order of the mapping."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.tag, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(tensor.data for tensor in tensors.values())


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Content], config: Mapping[str, object] = MappingProxyType({})
) -> Path:
    """A folder with one weights file and a config; returns it."""
    write_file(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"model_type": "plain", **config}), "utf-8")
    return folder


def read_file(path: Path) -> dict[str, Content]:
    """Every tensor of a file, as the safetensors library reads it."""
    found = {}
    for name, info in safetensors.deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
        found[name] = Content(tag=info["dtype"], shape=tuple(info["shape"]), data=bytes(info["data"]))
    return found


def total_bytes(tensors: Mapping[str, Content]) -> int:
    return sum(len(tensor.data) for tensor in tensors.values())


def check_saved(folder: Path, tensors: Mapping[str, Content]) -> None:
    """Check that the file that `--save` wrote holds exactly these tensors, bit for bit."""
    saved = read_file(folder / "rank-0.safetensors")
    assert sorted(saved) == sorted(tensors)
    wrong = [name for name in tensors if saved[name] != tensors[name]]
    assert wrong == []


def large(*, mib: int = 48, seed: int = 1) -> dict[str, Content]:
    """A model of so many MiB: large tensors, some small ones between them, several dtypes."""
    rows = mib * MIB // 8 // 2 // 1024
    tensors: dict[str, Content] = {}
    for layer in range(8):
        tensors[f"layers.{layer}.norm.weight"] = content("F32", 1000, seed=seed + layer)
        tensors[f"layers.{layer}.mlp.weight"] = content("BF16", rows, 1024, seed=seed + layer)
        tensors[f"layers.{layer}.scale"] = content("F32", seed=seed + layer)
    return tensors


# A decoder as its config.json describes it: two layers, 4 query and 2 key-value heads of 4, 21 words.
DECODER: Mapping[str, object] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 21,
        "dtype": "bfloat16",
    }
)
EXPERTS: Mapping[str, object] = MappingProxyType(
    {**DECODER, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 6}
)


def decoder(*, num_experts: int = 0) -> dict[str, Content]:
    """The checkpoint that `DECODER` describes, or with experts in both layers `EXPERTS`."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (21, 16), "model.norm.weight": (16,), "lm_head.weight": (21, 16),
    }  # fmt: skip
    for layer in range(2):
        path = f"model.layers.{layer}"
        shapes |= {f"{path}.{norm}_layernorm.weight": (16,) for norm in ("input", "post_attention")}
        shapes |= {
            f"{path}.self_attn.{part}_proj.weight": (rows, 16)
            for part, rows in zip("qkvo", (16, 8, 8, 16), strict=True)
        }
        if num_experts:
            shapes |= {f"{path}.self_attn.{part}_norm.weight": (4,) for part in "qk"}
            shapes[f"{path}.mlp.gate.weight"] = (num_experts, 16)
        for place, size in [(f"experts.{i}.", 6) for i in range(num_experts)] or [("", 24)]:
            shapes |= {f"{path}.mlp.{place}{part}_proj.weight": (size, 16) for part in ("gate", "up")}
            shapes[f"{path}.mlp.{place}down_proj.weight"] = (16, size)
    return {name: content("BF16", *shape, seed=number) for number, (name, shape) in enumerate(shapes.items())}
