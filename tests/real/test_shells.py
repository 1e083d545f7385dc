"""The shells of every rank hold what the published files hold, in the places that the architecture says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.real.conftest import digests
from weightwire.transfer.checkpoint import Checkpoint, find_checkpoint
from weightwire.transfer.checkpoint.iteration import open_reader
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.loading.direct import load_direct
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import ParameterTree, build_model, build_plain, parse_config

Way = Callable[[ParameterTree, Path], object]

# How the three kinds of projection are cut: rows, columns; what is left is whole on each rank.
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens")
COLUMNS = ("o_proj", "down_proj")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def by_tables(model: ParameterTree, folder: Path) -> None:
    model.load_weights(open_reader(find_checkpoint(folder)).iterate())


def by_walking(model: ParameterTree, folder: Path) -> None:
    model.load_weights(open_reader(find_checkpoint(folder)).iterate(), central=True)


def directly(model: ParameterTree, folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        load_direct(model, checkpoint, control=Control(deadline_s=100.0))


WAYS = [
    pytest.param(by_tables, id="by the model's tables"),
    pytest.param(by_walking, id="by walking the tree"),
    pytest.param(directly, id="region by region"),
]


# C4
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tp", [1, 3])
def test_smollm2_shells_equal_the_checkpoint(
    smollm2: Path, smollm2_tensors: Mapping[str, torch.Tensor], tp: int, way: Way
) -> None:
    config = parse_config((smollm2 / "config.json").read_text())
    for rank in range(tp):
        model = build_model(config, Topology(tp=tp), rank)
        poison(model)
        way(model, smollm2)
        shells = dict(model.named_parameters())
        assert {
            name for name in shells if not torch.equal(shells[name], slice_of(name, smollm2_tensors, rank, tp))
        } == set()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert sum(shell.numel() for shell in shells.values()) == num_elements(smollm2_tensors, tp)


@pytest.mark.parametrize("way", WAYS)
def test_minilm_shells_equal_the_checkpoint(minilm: Path, minilm_tensors: Mapping[str, torch.Tensor], way: Way) -> None:
    with Checkpoint.open(minilm) as checkpoint:
        model = build_plain(specs_of(checkpoint))
    poison(model)
    way(model, minilm)
    assert digests(model.state_dict().items()) == digests(minilm_tensors.items())


def poison(model: ParameterTree) -> None:
    """Full of NaN (or of the largest number), so that nothing can be right by chance."""
    for shell in model.parameters():
        shell.fill_(torch.nan if shell.is_floating_point() else torch.iinfo(shell.dtype).max)


def slice_of(name: str, tensors: Mapping[str, torch.Tensor], rank: int, tp: int) -> torch.Tensor:
    """What a shell has to hold: heads, intermediate rows and vocabulary are dealt in equal blocks."""
    prefix, _, module = name.removesuffix(".weight").rpartition(".")
    parts = [tensors[f"{prefix}.{part}.weight"] for part in FUSED.get(module, (module,))]
    if module in COLUMNS:
        return parts[0].chunk(tp, dim=1)[rank]
    if module in ROWS or module in FUSED:
        return torch.cat([part.chunk(tp)[rank] for part in parts])
    return parts[0]


def num_elements(tensors: Mapping[str, torch.Tensor], tp: int) -> int:
    """Elements of one rank: norms whole, all else in equal parts."""
    return sum(tensor.numel() if tensor.dim() == 1 else tensor.numel() // tp for tensor in tensors.values())
