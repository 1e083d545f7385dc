"""Where the real checkpoints lie, and what their files say by the word of another library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

FOLDER = Path(__file__).parents[2] / ".cache" / "real"
MINILM = FOLDER / "all-minilm-l6-v2"
SMOLLM2 = FOLDER / "smollm2-135m"


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, a BERT in float32."""
    return present(MINILM)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, a Llama in bf16 with tied embeddings: 30 layers, 9 heads, 3 KV heads of 64."""
    return present(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2_tensors(smollm2: Path) -> Mapping[str, torch.Tensor]:
    return load_file(smollm2 / "model.safetensors")


@pytest.fixture(scope="session")
def minilm_tensors(minilm: Path) -> Mapping[str, torch.Tensor]:
    return load_file(minilm / "model.safetensors")


def present(folder: Path) -> Path:
    if not folder.is_dir():
        pytest.skip(f"{folder.relative_to(FOLDER.parents[1])} is not there; `make test-real` makes it")
    return folder


def digests(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Dtype, shape and a digest of the bytes of each tensor."""
    found = {}
    for name, tensor in pairs:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        found[name] = (str(tensor.dtype), tuple(tensor.shape), xxhash.xxh3_128_hexdigest(flat.numpy().data))
    return found
