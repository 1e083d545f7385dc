"""The same published weights, through every reader, in one file, in shards and as a pickle, are the same bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.real.conftest import digests
from weightwire.transfer.checkpoint import Checkpoint, find_checkpoint
from weightwire.transfer.checkpoint.formats import ReaderOptions
from weightwire.transfer.checkpoint.iteration import open_reader, start_prefetch
from weightwire.transfer.checkpoint.read_plan import ReadOptions, choose_reader

NUM_SHARDS = 3
ONE, TWO = ReaderOptions(enable_multithread_load=False), ReaderOptions(num_threads=2)
OPTIONS = [
    pytest.param(ReadOptions(), id="as it comes"),
    pytest.param(ReadOptions(threads=ONE), id="mapped, one thread"),
    pytest.param(ReadOptions(threads=TWO), id="mapped, two threads"),
    pytest.param(ReadOptions(threads=ONE, mmap=False), id="read whole, one thread"),
    pytest.param(ReadOptions(threads=TWO, mmap=False), id="read whole, two threads"),
    pytest.param(ReadOptions(prefetch=True), id="with prefetch"),
    pytest.param(ReadOptions(threads=TWO, prefetch=True), id="with prefetch and two threads"),
    pytest.param(ReadOptions(threads=TWO, max_buffered_bytes=1), id="file by file"),
    pytest.param(ReadOptions(read_ahead=False), id="without reading ahead"),
    pytest.param(ReadOptions(drop_cache_after_load=True), id="giving the page cache back"),
]


@pytest.fixture(scope="module")
def folders(
    smollm2: Path, smollm2_tensors: Mapping[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Path]:
    """SmolLM2 as published, dealt into shards with an index, and as a pickle."""
    made = tmp_path_factory.mktemp("smollm2")
    names = sorted(smollm2_tensors)
    shards = {f"model-{i + 1:05}-of-{NUM_SHARDS:05}.safetensors": names[i::NUM_SHARDS] for i in range(NUM_SHARDS)}
    (made / "shards").mkdir()
    for file, members in shards.items():
        save_file({name: smollm2_tensors[name] for name in members}, made / "shards" / file)
    index = {"metadata": {}, "weight_map": {name: file for file, members in shards.items() for name in members}}
    (made / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    (made / "pickle").mkdir()
    torch.save(dict(smollm2_tensors), made / "pickle" / "pytorch_model.bin")
    return {"as published": smollm2, "in shards": made / "shards", "as a pickle": made / "pickle"}


# C8
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", ["as published", "in shards", "as a pickle"])
def test_every_reader_gives_the_same_bytes(
    folders: Mapping[str, Path], smollm2_tensors: Mapping[str, torch.Tensor], form: str, options: ReadOptions
) -> None:
    files, plan = find_checkpoint(folders[form]), choose_reader(options)
    prefetch = start_prefetch(files, plan)
    assert digests(open_reader(files, plan, prefetch=prefetch).iterate()) == digests(smollm2_tensors.items())
    if prefetch is not None:
        prefetch.stop()
        assert not prefetch.failed


@pytest.mark.parametrize("form", ["as published", "in shards"])
def test_an_open_checkpoint_gives_the_same_bytes(
    folders: Mapping[str, Path], smollm2_tensors: Mapping[str, torch.Tensor], form: str
) -> None:
    with Checkpoint.open(folders[form]) as checkpoint:
        assert digests(checkpoint.iterate()) == digests(smollm2_tensors.items())
