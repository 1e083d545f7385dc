"""What a load of DeepSeek's checkpoints keeps in memory beside the shells: bounds that are counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.transfer.models.conftest import VOCAB, Saved, differences, poisoned, write_folder
from tests.transfer.models.test_deepseek import in_fp8
from weightwire.transfer.checkpoint import Checkpoint, DiscoveryOptions, find_checkpoint
from weightwire.transfer.checkpoint.formats import ReaderOptions
from weightwire.transfer.checkpoint.iteration import open_reader
from weightwire.transfer.checkpoint.read_plan import ReadOptions, choose_reader
from weightwire.transfer.control import Control
from weightwire.transfer.loading.direct import load_direct
from weightwire.transfer.loading.halves import HalvesLoader, check_halves
from weightwire.transfer.loading.hand_off import BoundedPlacement
from weightwire.transfer.loading.landing import land_all
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.slots import attached_loader
from weightwire.transfer.manifest import Topology

MIB = 1 << 20
PATIENCE_S = 5.0
SavedBy = Callable[[str], Saved]


# L35, L126, C12
@pytest.mark.parametrize("rank", range(4))
def test_of_a_tensor_of_all_experts_a_rank_reads_its_own(saved: SavedBy, tmp_path: Path, rank: int) -> None:
    checkpoint = saved("deepseek_v3").fused()
    whole = {name: tensor for name, tensor in checkpoint.tensors.items() if ".experts." in name}
    folder = write_folder(tmp_path, checkpoint.members, checkpoint.tensors)
    tree = poisoned(checkpoint.config, Topology(tp=4, ep=2), rank)
    with Checkpoint.open(folder) as opened:
        read = load_direct(tree, opened, control=Control(deadline_s=60)).bytes_read
    shells = shells_of(tree)
    experts = sum(shell.nbytes for name, shell in shells.items() if ".experts." in name)
    assert experts == sum(tensor.nbytes for tensor in whole.values()) // 4
    expected = 0
    for name, shell in shells.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            # The rest of these rows is padding.
            expected += max(0, min(shell.shape[0], VOCAB - rank * shell.shape[0])) * shell[0].nbytes
        else:
            # The one that is kept in float32 is half as large in the file.
            expected += shell.nbytes // (2 if shell.dtype == torch.float32 else 1)
    assert read == expected


def mapped(files: list[Path]) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines} & {str(file) for file in files}


# L126, C12
@pytest.mark.parametrize(("budget", "most"), [(8 * MIB, 1), (16 * MIB, 2)], ids=["of one file", "of two files"])
def test_file_waits_until_the_tensor_of_all_experts_before_it_is_gone(tmp_path: Path, budget: int, most: int) -> None:
    files = [tmp_path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, file in enumerate(files):
        fused = torch.full((4, 512, 2048), float(number), dtype=torch.bfloat16)
        assert fused.nbytes == 8 * MIB
        save_file({f"model.layers.{number}.mlp.experts.gate_up_proj": fused}, file)
    asked = ReadOptions(threads=ReaderOptions(enable_multithread_load=True, num_threads=2), max_buffered_bytes=budget)
    reader = open_reader(find_checkpoint(tmp_path, DiscoveryOptions()), choose_reader(asked))
    seen, pause = list[int](), threading.Event()
    for _, tensor in reader.iterate():
        for _ in range(int(PATIENCE_S * 1000)):
            if len(mapped(files)) >= min(most, 2 - len(seen)):
                break
            pause.wait(0.001)
        seen.append(len(mapped(files)))
        del tensor
    assert seen == [most, 1]


# L48, L128, L131, C12
def test_stream_through_workers_gives_the_same_shells_and_holds_no_more_than_its_bound(saved: SavedBy) -> None:
    checkpoint = in_fp8(saved("deepseek_v32"))
    expected, tree = (poisoned(checkpoint.config) for _ in range(2))
    expected.load_weights(checkpoint.tensors.items())
    shells, resolver = shells_of(tree), tree.resolver()
    in_flight = list[int]()
    with BoundedPlacement(max_tensors=3, workers=8) as placement:
        for name, tensor in checkpoint.tensors.items():
            outcomes = resolver.resolve_all(name)
            placement.submit(partial(_land, outcomes, shells), tensor)
            in_flight.append(placement.in_flight)
    assert max(in_flight) <= 3
    check_halves(shells)
    assert differences(expected, tree) == []


def _land(outcomes: object, shells: dict[str, torch.Tensor], tensor: torch.Tensor) -> None:
    assert isinstance(outcomes, tuple)
    land_all(outcomes, tensor, shells.__getitem__)


# L128, C12
@pytest.mark.parametrize("scales_first", [False, True], ids=["weights first", "scales first"])
def test_pairs_that_wait_hold_scales_alone(saved: SavedBy, *, scales_first: bool) -> None:
    checkpoint = in_fp8(saved("deepseek_v32"))
    tree = poisoned(checkpoint.config)
    loaders = [attached_loader(shell) for shell in shells_of(tree).values()]
    halves = [loader for loader in loaders if isinstance(loader, HalvesLoader)]
    assert len(halves) == checkpoint.config.num_layers
    order = sorted(checkpoint.tensors, key=lambda name: name.endswith("_scale_inv") != scales_first)
    held = list[int]()

    def counted(name: str) -> tuple[str, torch.Tensor]:
        held.append(sum(loader.held_bytes for loader in halves))
        return name, checkpoint.tensors[name]

    tree.load_weights(map(counted, order))
    scales = sum(t.nbytes for n, t in checkpoint.tensors.items() if n.endswith("indexer.wk.weight_scale_inv"))
    assert max(held) == (scales if scales_first else 0)


# L129
def test_load_that_failed_leaves_no_half_to_the_next_one(saved: SavedBy) -> None:
    checkpoint = in_fp8(saved("deepseek_v32"))
    tree, expected = poisoned(checkpoint.config), poisoned(checkpoint.config)
    stale = "model.layers.0.self_attn.indexer.wk.weight_scale_inv"

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield stale, checkpoint.tensors[stale] * 3
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="gone"):
        tree.load_weights(stream())
    order = sorted(checkpoint.tensors, key=lambda name: name.endswith("_scale_inv"))
    tree.load_weights((name, checkpoint.tensors[name]) for name in order)
    expected.load_weights(checkpoint.tensors.items())
    assert differences(expected, tree) == []
