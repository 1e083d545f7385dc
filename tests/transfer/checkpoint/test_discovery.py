"""Which files are the checkpoint: discovery by name, and what the reader adds by looking into headers."""

import dataclasses
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.checkpoint.discovery import (
    INDEX_NAME,
    CheckpointFiles,
    DiscoveryOptions,
    DuplicatePolicy,
    find_checkpoint,
)
from weightwire.transfer.checkpoint.formats import SERVED, LoadFormat
from weightwire.transfer.checkpoint.reader import Checkpoint
from weightwire.transfer.diagnostics import Stage, diagnostic_of
from weightwire.transfer.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointPathError,
    SettingsError,
    TransferError,
)
from weightwire.transfer.ranks import GroupRank

WriteTensors = Callable[[Path, Mapping[str, tuple[str, list[int], bytes]]], Path]
EIGHT = bytes(range(8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a"
    path.mkdir()
    return path


def touch(folder: Path, *names: str) -> None:
    """Make empty files: discovery alone does not look into them."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def write_index(folder: Path, weight_map: object, name: str = INDEX_NAME) -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def asking(load_format: str = "auto", *patterns: str, fallback: bool = False) -> DiscoveryOptions:
    return DiscoveryOptions(load_format=LoadFormat(load_format), patterns=patterns or None, allow_pt_fallback=fallback)


def names_of(files: CheckpointFiles) -> list[str]:
    return [str(file.relative_to(files.folder)) for file in files.files]


def found(folder: Path, options: DiscoveryOptions | None = None) -> list[str]:
    return names_of(find_checkpoint(folder, options))


# Patterns and containers


# L09
@pytest.mark.parametrize("load_format", [name for name in LoadFormat if name not in SERVED])
def test_format_that_is_not_served_is_refused_before_any_file_is_looked_at(load_format: LoadFormat) -> None:
    with pytest.raises(SettingsError, match=f"{load_format.value}.*auto, safetensors, pt, npcache, mistral, dummy"):
        DiscoveryOptions(load_format=load_format)


def test_format_without_files_has_nothing_to_discover() -> None:
    with pytest.raises(SettingsError, match="'dummy': reads no files"):
        DiscoveryOptions(load_format=LoadFormat.DUMMY)


# L13
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(asking("auto"), ["m.safetensors"], id="auto"),
        pytest.param(asking("safetensors"), ["m.safetensors"], id="safetensors"),
        pytest.param(asking("mistral"), ["consolidated.safetensors"], id="mistral"),
        pytest.param(asking("pt"), ["m.pt"], id="pt"),
        pytest.param(asking("npcache"), ["m.bin"], id="npcache"),
        pytest.param(asking("auto", "w*.bin", fallback=True), ["w.bin"], id="an override replaces all patterns"),
        pytest.param(asking("auto", "*.pth"), ["m.pth"], id="an override reaches what no format does"),
    ],
)
def test_format_reads_the_files_of_its_patterns_alone(
    folder: Path, options: DiscoveryOptions, expected: list[str]
) -> None:
    touch(folder, "m.safetensors", "consolidated.safetensors", "m.bin", "w.bin", "m.pt", "m.pth", "m.txt")
    if options.load_format is LoadFormat.NPCACHE:
        (folder / "w.bin").unlink()
    assert found(folder, options) == expected


# L14
@pytest.mark.parametrize(
    ("names", "expected", "container"),
    [
        pytest.param(["m.safetensors", "m.bin"], ["m.safetensors"], "safetensors", id="safetensors before bin"),
        pytest.param(["m.bin", "m.pt"], ["m.bin"], "pickle", id="bin before pt"),
        pytest.param(["m.pt"], ["m.pt"], "pickle", id="pt last"),
        pytest.param(["optimizer.bin", "m.pt"], ["m.pt"], "pickle", id="a training artefact is no match"),
    ],
)
def test_first_pattern_that_matches_wins(folder: Path, names: list[str], expected: list[str], container: str) -> None:
    touch(folder, *names)
    files = find_checkpoint(folder, asking(fallback=True))
    assert (names_of(files), files.container) == (expected, container)


# L15
def test_container_is_that_of_the_pattern_that_matched(folder: Path) -> None:
    touch(folder, "a.pt")
    files = find_checkpoint(folder, asking("safetensors", fallback=True))
    assert (names_of(files), files.container) == (["a.pt"], "pickle")
    with pytest.raises(CheckpointNotFoundError, match="Cannot find any model weights"):
        find_checkpoint(folder, asking("safetensors"))


# L15
@pytest.mark.parametrize("fallback", [True, False])
def test_fallback_never_reaches_bin_files(folder: Path, fallback: bool) -> None:
    touch(folder, "a.bin")
    with pytest.raises(CheckpointNotFoundError, match="Cannot find any model weights"):
        find_checkpoint(folder, asking("safetensors", fallback=fallback))


# L16
def test_mistral_format_reads_consolidated_files_alone(folder: Path) -> None:
    touch(folder, "consolidated.00.safetensors", "model.safetensors")
    # The index of the other copy says nothing about this one.
    write_index(folder, {"a": "model.safetensors"})
    assert found(folder, asking("mistral")) == ["consolidated.00.safetensors"]


# L16
def test_mistral_format_follows_its_own_index(folder: Path) -> None:
    names = [f"consolidated-0000{number}-of-00002.safetensors" for number in (1, 2)]
    touch(folder, *names, "consolidated.safetensors", "model.safetensors")
    index = "consolidated.safetensors.index.json"
    write_index(folder, {"a": names[0], "b": names[1]}, name=index)
    files = find_checkpoint(folder, asking("mistral"))
    assert (names_of(files), files.index) == (names, folder / index)
    write_index(folder, {"a": names[0], "b": "model.safetensors"}, name=index)
    with pytest.raises(CheckpointError, match=r"'b' is in 'model.safetensors', expected consolidated\*"):
        find_checkpoint(folder, asking("mistral"))


# L23
def test_training_artefacts_are_dropped_by_their_exact_names(folder: Path) -> None:
    touch(folder, "optimizer.bin", "model.bin", "training_args.bin")
    assert found(folder) == ["model.bin"]
    touch(folder, "my_optimizer.bin")
    assert found(folder) == ["model.bin", "my_optimizer.bin"]
    touch(folder, "optimizer.pt", "scheduler.pt", "scaler.pt", "model.pt")
    assert found(folder, asking("pt")) == ["model.pt"]


def test_pickle_shards_must_be_complete_too(folder: Path) -> None:
    touch(folder, "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointNotFoundError, match=r"absent \[2\]"):
        find_checkpoint(folder)
    touch(folder, "pytorch_model-00002-of-00002.bin", "pytorch_model.bin")
    write_index(
        folder,
        {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"},
        name="pytorch_model.bin.index.json",
    )
    assert found(folder) == ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]


def test_byte_ranges_of_a_pickle_are_refused(folder: Path) -> None:
    touch(folder, "model.bin")
    with pytest.raises(CheckpointError, match=r"model\.bin' is a PyTorch pickle; .* safetensors alone"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("pattern", ["*", "model*", "sub/*.bin", "*.gguf", "", "\0.bin"])
def test_pattern_that_says_no_kind_of_file_is_refused(pattern: str) -> None:
    with pytest.raises(SettingsError, match="file pattern"):
        asking("auto", pattern)


# The index


# L17
def test_index_names_the_files_and_others_are_left_alone(folder: Path) -> None:
    touch(folder, "s2.safetensors", "s1.safetensors", "sub/ok.safetensors", "merged.safetensors", "model.safetensors")
    write_index(folder, {"c": "sub/ok.safetensors", "b": "s2.safetensors", "a": "./s1.safetensors"})
    files = find_checkpoint(folder)
    assert files.files == (folder / "s1.safetensors", folder / "s2.safetensors", folder / "sub/ok.safetensors")
    assert files.index == folder / INDEX_NAME
    assert files.indexed_names["b"] == folder / "s2.safetensors"
    assert files.container == "safetensors"


# L18
def test_b01_shard_that_the_index_lists_and_the_disk_lacks_is_named(folder: Path, write_tensors: WriteTensors) -> None:
    write_tensors(folder / "model-00001-of-00002.safetensors", {"a": ("F32", [2], EIGHT)})
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointNotFoundError) as caught:
        Checkpoint.open(folder)
    assert "1 of its 2 files are absent: 'model-00002-of-00002.safetensors'" in str(caught.value)
    assert INDEX_NAME in str(caught.value)
    assert caught.value.facts["missing"] == ["model-00002-of-00002.safetensors"]


def test_b01_stale_index_is_refused_even_if_a_complete_set_lies_there(folder: Path) -> None:
    write_index(folder, {f"t{i}": f"old-{i:05}-of-00030.safetensors" for i in range(1, 31)})
    touch(folder, *(f"model-{i:05}-of-00015.safetensors" for i in range(1, 16)))
    with pytest.raises(CheckpointNotFoundError, match=r"30 of its 30 files.*15 other files.*stale") as caught:
        find_checkpoint(folder)
    assert all(f"old-{i:05}-of-00030.safetensors" in str(caught.value) for i in range(1, 31))
    (folder / INDEX_NAME).unlink()
    assert len(find_checkpoint(folder).files) == 15


def test_b01_shard_that_is_a_dead_link_counts_as_absent(folder: Path) -> None:
    (folder / "s.safetensors").symlink_to(folder / "blobs" / "gone")
    write_index(folder, {"a": "s.safetensors"})
    with pytest.raises(CheckpointNotFoundError, match=r"s\.safetensors"):
        find_checkpoint(folder)


def test_tensor_that_the_index_promises_must_be_in_some_header(folder: Path, write_tensors: WriteTensors) -> None:
    write_tensors(folder / "s.safetensors", {"a": ("F32", [2], EIGHT), "unlisted": ("U8", [1], b"1")})
    write_index(folder, {"a": "s.safetensors", "b": "s.safetensors"})
    with pytest.raises(CheckpointError, match=r"1 of its tensors.*'b', expected in .*s\.safetensors"):
        Checkpoint.open(folder)
    write_index(folder, {"a": "s.safetensors"})
    with Checkpoint.open(folder) as checkpoint:
        assert list(checkpoint.entries) == ["a", "unlisted"]


OUTSIDE = [
    pytest.param("../x.safetensors", id="the parent"),
    pytest.param("/etc/x.safetensors", id="absolute"),
    pytest.param("sub/../../x.safetensors", id="down and further up"),
    pytest.param("sub/../ok.safetensors", id="down and up again"),
    pytest.param("..", id="nothing but up"),
    pytest.param("a\\..\\x.safetensors", id="backslashes"),
    pytest.param("../a-evil/x.safetensors", id="a sibling with the folder's name as prefix"),
    pytest.param("s.safetensors\0.txt", id="a NUL byte"),
    pytest.param("\ud800.safetensors", id="half a surrogate"),
    pytest.param(7, id="a number"),
    pytest.param(None, id="null"),
    pytest.param(["s.safetensors"], id="a list"),
    pytest.param(True, id="a bool"),
]


# L18
def test_absent_shard_is_counted_and_named(folder: Path) -> None:
    touch(folder, "s1.safetensors")
    write_index(folder, {"a": "s1.safetensors", "b": "s2.safetensors"})
    with pytest.raises(CheckpointNotFoundError, match=r"index .*: 1 of its 2 files are absent: 's2\.safetensors'"):
        find_checkpoint(folder)


# L18
def test_override_has_only_the_files_that_it_matches_checked(folder: Path) -> None:
    touch(folder, "s1.safetensors", "t.safetensors")
    write_index(folder, {"a": "s1.safetensors", "b": "s2.safetensors"})
    files = find_checkpoint(folder, asking("auto", "s1*.safetensors"))
    assert (names_of(files), list(files.indexed_names)) == (["s1.safetensors"], ["a"])
    with pytest.raises(CheckpointNotFoundError, match=r"1 of its 1 files are absent: 's2\.safetensors'"):
        find_checkpoint(folder, asking("auto", "s2*.safetensors"))
    with pytest.raises(CheckpointNotFoundError, match="Cannot find any model weights"):
        find_checkpoint(folder, asking("auto", "t*.safetensors"))


# L17, D02
def test_merged_copy_beside_indexed_shards_is_left_out_and_noted(folder: Path) -> None:
    touch(folder, "s1.safetensors", "s2.safetensors", "consolidated.safetensors")
    write_index(folder, {"a": "s1.safetensors", "b": "s2.safetensors"})
    files = find_checkpoint(folder)
    assert names_of(files) == ["s1.safetensors", "s2.safetensors"]
    assert [(note.code, note.stage) for note in files.notes] == [("D02", Stage.DISCOVERY)]
    assert "'consolidated.safetensors'" in files.notes[0].detail


def write_config(folder: Path, architecture: str, nextn: object) -> None:
    members = {"architectures": [architecture], "num_nextn_predict_layers": nextn}
    (folder / "config.json").write_text(json.dumps(members))


# L22
@pytest.mark.parametrize(
    ("architecture", "nextn", "is_added"),
    [
        pytest.param("Glm4MoeForCausalLM", 1, True, id="GLM with a draft layer"),
        pytest.param("Glm4MoeLiteForCausalLM", 1, True, id="its small sister"),
        pytest.param("Glm4MoeForCausalLMNextN", 1, True, id="its draft form"),
        pytest.param("Glm4MoeLiteForCausalLMNextN", 2, True, id="the sister's draft form"),
        pytest.param("Glm4MoeForCausalLM", 0, False, id="no draft layer"),
        pytest.param("Glm4MoeForCausalLM", "1", False, id="a string for a number"),
        pytest.param("DeepseekV3ForCausalLM", 1, False, id="another architecture"),
    ],
)
def test_mtp_shard_that_the_index_omits_is_added_back_for_glm_alone(
    folder: Path, caplog: pytest.LogCaptureFixture, architecture: str, nextn: object, is_added: bool
) -> None:
    touch(folder, "s1.safetensors", "mtp.safetensors")
    write_index(folder, {"a": "s1.safetensors"})
    write_config(folder, architecture, nextn)
    with caplog.at_level(logging.WARNING):
        files = find_checkpoint(folder)
    assert names_of(files) == (["mtp.safetensors"] if is_added else []) + ["s1.safetensors"]
    assert ("report it" in caplog.text) is is_added
    assert [(note.code, note.subject) for note in files.notes] == [("D03", f"file '{folder}/mtp.safetensors'")]


# L22
def test_mtp_shard_that_the_index_names_is_nothing_special(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    touch(folder, "s1.safetensors", "mtp.safetensors")
    write_index(folder, {"a": "s1.safetensors", "b": "mtp.safetensors"})
    write_config(folder, "Glm4MoeForCausalLM", 1)
    with caplog.at_level(logging.WARNING):
        files = find_checkpoint(folder)
    assert (names_of(files), files.notes, caplog.text) == (["mtp.safetensors", "s1.safetensors"], (), "")


# L19
@pytest.mark.parametrize("value", OUTSIDE)
def test_b57_index_that_leaves_the_folder_is_refused_before_anything_is_opened(folder: Path, value: object) -> None:
    evil = folder.parent / "a-evil"
    evil.mkdir()
    for victim in (evil / "x.safetensors", folder.parent / "x.safetensors"):
        # An open would wait for a writer, a stat would count a hit: neither may happen.
        os.mkfifo(victim)
    # `gone` is absent, which would be noticed first if files were looked for before all names are checked.
    write_index(folder, {"a": "gone.safetensors", "b": value})
    with pytest.raises(CheckpointPathError, match="'b'"):
        find_checkpoint(folder)


def test_b57_absolute_path_is_refused_even_if_it_points_inside(folder: Path) -> None:
    touch(folder, "s.safetensors")
    write_index(folder, {"a": str(folder / "s.safetensors")})
    with pytest.raises(CheckpointPathError, match="absolute"):
        find_checkpoint(folder)


def test_b57_link_that_leaves_the_folder_is_the_owners_own(folder: Path, write_tensors: WriteTensors) -> None:
    blob = write_tensors(folder.parent / "blobs" / "3f2a", {"a": ("F32", [2], EIGHT)})
    (folder / "model.safetensors").symlink_to(blob)
    write_index(folder, {"a": "model.safetensors"})
    with Checkpoint.open(folder) as checkpoint:
        assert list(checkpoint.entries) == ["a"]


def test_b57_checkpoint_path_with_a_nul_byte_is_refused() -> None:
    with pytest.raises(CheckpointPathError, match="NUL"):
        find_checkpoint(Path("a\0b"))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("[]", id="a list"),
        pytest.param("{}", id="no weight_map"),
        pytest.param('{"weight_map": {}}', id="an empty weight_map"),
        pytest.param('{"weight_map": ["s.safetensors"]}', id="a list as weight_map"),
        pytest.param('{"weight_map": {"a": "s.safetensors", "a": "t.safetensors"}}', id="a name twice"),
        pytest.param('{"weight_map": {"a": "model.bin"}}', id="another format"),
        pytest.param('{"weight_map": {"a": ""}}', id="an empty file name"),
        pytest.param('{"weight_map": {"a": "."}}', id="the folder itself"),
        pytest.param('{"weight_map": ' + '{"a":' * 100_000, id="nested without end"),
    ],
)
def test_malformed_index_is_refused_by_name(folder: Path, text: str) -> None:
    (folder / INDEX_NAME).write_text(text)
    touch(folder, "s.safetensors", "t.safetensors", "model.safetensors")
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        find_checkpoint(folder)


def test_index_that_is_a_dead_link_is_not_taken_for_no_index(folder: Path) -> None:
    touch(folder, "model.safetensors")
    (folder / INDEX_NAME).symlink_to(folder / "gone")
    with pytest.raises(CheckpointNotFoundError, match="link whose target is absent"):
        find_checkpoint(folder)


PARTS = st.lists(st.sampled_from(["..", ".", "a", "", "~", "x.safetensors", "\\", "\0"]), min_size=1, max_size=6)


# L19
@given(value=st.one_of(st.text(max_size=20), PARTS.map("/".join)))
def test_b57_index_never_reaches_outside_whatever_it_says(value: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "around" / "a"
    if not folder.exists():
        (folder / "a").mkdir(parents=True)
        touch(
            folder, "x.safetensors", "a/x.safetensors", "a/a/x.safetensors", "../x.safetensors", "../../x.safetensors"
        )
    write_index(folder, {"a": value})
    try:
        files = find_checkpoint(folder)
    except TransferError:
        return
    assert [file.resolve().is_relative_to(folder.resolve()) for file in files.files] == [True]


# No index


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(["model.safetensors"], ["model.safetensors"], id="the one file"),
        pytest.param(["other.safetensors"], ["other.safetensors"], id="one file of any name"),
        pytest.param(["c.safetensors", "a.safetensors", "b.safetensors"], ["a", "b", "c"], id="any set, sorted"),
        pytest.param(
            ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"],
            ["model-00001-of-00002", "model-00002-of-00002"],
            id="complete shards, sorted",
        ),
        pytest.param(
            ["w-0-of-2.safetensors", "w-1-of-2.safetensors"], ["w-0-of-2", "w-1-of-2"], id="counted from zero"
        ),
        pytest.param(["m-1-of-1.safetensors", "mtp.safetensors"], ["m-1-of-1", "mtp"], id="shards and one more"),
        pytest.param(
            ["model.safetensors", "._model.safetensors", ".weightwire-1.tmp", "sub/x.safetensors"],
            ["model.safetensors"],
            id="hidden files and sub-folders aside",
        ),
    ],
)
def test_files_without_index(folder: Path, names: list[str], expected: list[str]) -> None:
    touch(folder, *names)
    assert found(folder) == [name.removesuffix(".safetensors") + ".safetensors" for name in expected]
    assert find_checkpoint(folder).index is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(["model-00001-of-00002.safetensors"], r"absent \[2\]", id="the second is absent"),
        pytest.param(["w-0-of-3.safetensors", "w-2-of-3.safetensors"], r"absent \[1\]", id="counted from zero"),
        pytest.param(["m-1-of-1.safetensors", "m-2-of-1.safetensors"], r"unexpected \[2\]", id="one too many"),
        pytest.param(["m-1-of-2.safetensors", "m-01-of-2.safetensors"], r"absent \[2\]", id="one number twice"),
        pytest.param(["m-1-of-999999999.safetensors"], "999999999 shards", id="a set of absurd size"),
    ],
)
def test_incomplete_shards_are_refused(folder: Path, names: list[str], expected: str) -> None:
    touch(folder, *names)
    with pytest.raises(CheckpointNotFoundError, match=expected):
        find_checkpoint(folder)


# L20
def test_b03_consolidated_copy_beside_model_is_never_opened(
    folder: Path, write_tensors: WriteTensors, caplog: pytest.LogCaptureFixture
) -> None:
    # A FIFO: whoever opened it would be refused, or wait for ever.
    os.mkfifo(folder / "consolidated.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    write_tensors(folder / "model.safetensors", {name: ("F32", [2], EIGHT)})
    with caplog.at_level(logging.WARNING), Checkpoint.open(folder) as checkpoint:
        assert [yielded for yielded, _ in checkpoint.iterate()] == [name]
    assert "'consolidated.safetensors'" in caplog.text
    assert [note.code for note in checkpoint.files.notes] == ["D02"]


# L20
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["consolidated", "model"], ["model"]),
        (["consolidated", "model-1-of-2", "model-2-of-2"], ["model-1-of-2", "model-2-of-2"]),
    ],
)
def test_consolidated_file_gives_way_to_the_others(folder: Path, names: list[str], expected: list[str]) -> None:
    touch(folder, *(f"{name}.safetensors" for name in names))
    assert found(folder) == [f"{name}.safetensors" for name in expected]


# L20
def test_b03_consolidated_copy_beside_shards_is_never_opened(folder: Path, write_tensors: WriteTensors) -> None:
    os.mkfifo(folder / "consolidated.safetensors")
    os.mkfifo(folder / "consolidated.00.safetensors")
    write_tensors(folder / "model-00001-of-00002.safetensors", {"a": ("F32", [2], EIGHT)})
    write_tensors(folder / "model-00002-of-00002.safetensors", {"b": ("F32", [2], EIGHT)})
    with Checkpoint.open(folder) as checkpoint:
        assert [name for name, _ in checkpoint.iterate()] == ["a", "b"]


def test_b03_unlisted_split_beside_an_indexed_one_is_never_opened(folder: Path, write_tensors: WriteTensors) -> None:
    for number in range(1, 5):
        os.mkfifo(folder / f"model-0000{number}-of-00004.safetensors")
    for number, name in enumerate("ab", start=1):
        write_tensors(folder / f"model-0000{number}-of-00002.safetensors", {name: ("F32", [2], EIGHT)})
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    with Checkpoint.open(folder) as checkpoint:
        assert [name for name, _ in checkpoint.iterate()] == ["a", "b"]


@pytest.mark.parametrize("more", [[], ["consolidated.00.safetensors"], ["consolidated.safetensors.index.json"]])
def test_b03_consolidated_alone_is_refused_by_its_formats_name(folder: Path, more: list[str]) -> None:
    touch(folder, "consolidated.safetensors", "params.json", *more)
    with pytest.raises(CheckpointNotFoundError, match="in the format 'mistral', which must be asked for"):
        find_checkpoint(folder)
    assert found(folder, asking("auto", "consolidated*.safetensors"))[0].startswith("consolidated")


def test_b03_two_splits_without_index_are_ambiguous(folder: Path) -> None:
    touch(folder, *(f"model-{i:05}-of-00002.safetensors" for i in (1, 2)))
    touch(folder, *(f"model-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4)))
    with pytest.raises(CheckpointError, match="several sets of shards") as caught:
        find_checkpoint(folder)
    assert "in 2 shards" in str(caught.value)
    assert "in 4 shards" in str(caught.value)


def test_x3_sibling_prefix_gives_way_to_the_exact_pattern(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    touch(folder, *(f"model-2-{i:05}-of-00003.safetensors" for i in (3, 1, 2)))
    touch(folder, *(f"model-{i:05}-of-00003.safetensors" for i in (2, 3, 1)))
    with caplog.at_level(logging.WARNING):
        assert found(folder) == [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert "'model-2-00001-of-00003.safetensors'" in caplog.text


def test_x3_exact_pattern_that_is_incomplete_is_not_replaced_by_its_sibling(folder: Path) -> None:
    touch(folder, *(f"model-2-{i:05}-of-00002.safetensors" for i in (1, 2)), "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"'model' in 2 shards, 1 of them here: absent \[2\]"):
        find_checkpoint(folder)


def test_x3_two_foreign_prefixes_are_ambiguous(folder: Path) -> None:
    touch(folder, "x-1-of-1.safetensors", "y-1-of-1.safetensors")
    with pytest.raises(CheckpointError, match="several sets"):
        find_checkpoint(folder)


# L21, D02
@pytest.mark.parametrize("with_index", [False, True])
def test_x3_name_in_two_files_is_refused_naming_both(
    folder: Path, write_tensors: WriteTensors, with_index: bool
) -> None:
    write_tensors(folder / "s1.safetensors", {"a.weight": ("F32", [2], EIGHT), "b": ("U8", [1], b"1")})
    write_tensors(folder / "s2.safetensors", {"a.weight": ("F32", [2], EIGHT), "c": ("U8", [1], b"1")})
    if with_index:
        write_index(folder, {"a.weight": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"})
    with pytest.raises(CheckpointError, match=r"'a.weight'.*s1\.safetensors.*s2\.safetensors") as caught:
        Checkpoint.open(folder)
    diagnostic = diagnostic_of(caught.value)
    assert diagnostic is not None
    assert (diagnostic.code, diagnostic.stage) == ("D02", Stage.DISCOVERY)


# L21
def test_first_of_two_copies_counts_if_that_was_asked_for(
    folder: Path, write_tensors: WriteTensors, caplog: pytest.LogCaptureFixture
) -> None:
    write_tensors(folder / "s1.safetensors", {"a.weight": ("U8", [1], b"1")})
    write_tensors(folder / "s2.safetensors", {"a.weight": ("U8", [1], b"2"), "b": ("U8", [1], b"3")})
    options = DiscoveryOptions(duplicates=DuplicatePolicy.FIRST)
    with caplog.at_level(logging.WARNING), Checkpoint.open(folder, options) as checkpoint:
        assert {name: bytes(tensor.tolist()) for name, tensor in checkpoint.iterate()} == {"a.weight": b"1", "b": b"3"}
        assert [note.code for note in checkpoint.files.notes] == ["D02"]
    assert "'a.weight'" in caplog.text
    assert [policy.value for policy in DuplicatePolicy] == ["refuse", "first"]


# L29
@pytest.mark.parametrize(("sort_files", "group"), [(2, GroupRank(1, 2)), (-1, GroupRank())])
def test_order_that_would_choose_among_copies_is_refused_before_any_file_is_looked_at(
    sort_files: int, group: GroupRank
) -> None:
    with pytest.raises(SettingsError, match="would decide which copy is loaded"):
        DiscoveryOptions(duplicates=DuplicatePolicy.FIRST, sort_files=sort_files, group=group)
    DiscoveryOptions(sort_files=sort_files, group=group)


# L29
def test_staggered_ranks_refuse_a_name_in_two_files(folder: Path, write_tensors: WriteTensors) -> None:
    for number in range(4):
        write_tensors(folder / f"{number}.safetensors", {"a" if number in (0, 3) else f"b{number}": ("U8", [1], b"1")})
    for rank in (0, 1):
        with pytest.raises(CheckpointError, match=r"'a': is in two files, .*[03]\.saf.*[03]\.saf"):
            Checkpoint.open(folder, DiscoveryOptions(sort_files=2, group=GroupRank(rank, 2)))


# L25, L27
def test_record_has_the_files_in_this_ranks_order(folder: Path) -> None:
    touch(folder, *(f"{number}.safetensors" for number in range(8)))
    options = DiscoveryOptions(sort_files=1, group=GroupRank(1, 4))
    assert found(folder, options) == [f"{number}.safetensors" for number in (1, 2, 3, 0, 5, 6, 7, 4)]


# L26
def test_listing_order_is_kept_if_that_was_asked_for(folder: Path) -> None:
    touch(folder, *(f"{name}.safetensors" for name in "qcaxbm"))
    as_listed = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    assert found(folder, DiscoveryOptions(sort_files=-1)) == as_listed
    write_index(folder, {"1": "c.safetensors", "2": "a.safetensors", "3": "c.safetensors", "4": "b.safetensors"})
    assert found(folder, DiscoveryOptions(sort_files=-1)) == ["c.safetensors", "a.safetensors", "b.safetensors"]
    assert found(folder) == ["a.safetensors", "b.safetensors", "c.safetensors"]


# L23
def test_x1_training_artefacts_are_never_weights(folder: Path) -> None:
    touch(folder, "pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.safetensors")
    assert found(folder) == ["model.safetensors"]
    (folder / "model.safetensors").unlink()
    assert found(folder) == ["pytorch_model.bin"]
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointNotFoundError) as caught:
        find_checkpoint(folder, asking(fallback=True))
    assert "training_args" not in str(caught.value)
    assert "optimizer" not in str(caught.value)


# Nothing to read


# L24, D01
def test_nothing_found_names_patterns_and_extensions(folder: Path) -> None:
    touch(folder, "a.bin")
    with pytest.raises(CheckpointNotFoundError, match="Cannot find any model weights with") as caught:
        find_checkpoint(folder, asking("safetensors"))
    assert "*.safetensors" in str(caught.value)
    assert ".bin" in str(caught.value)
    assert caught.value.facts["patterns"] == ["*.safetensors"]
    assert caught.value.facts["extensions"] == [".bin"]
    diagnostic = diagnostic_of(caught.value)
    assert diagnostic is not None
    assert (diagnostic.code, diagnostic.stage) == ("D01", Stage.DISCOVERY)


# L24
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(["a.pt"], "'a.pt' is PyTorch pickle, which the format 'pt' or the fallback", id="a .pt"),
        pytest.param(["a.gguf", "b.pth"], "'a.gguf' is GGUF, .*'b.pth' is PyTorch pickle, which an", id="two formats"),
        pytest.param(["config.json", "tokenizer.model"], r"extensions \['.json', '.model'\]$", id="no weights"),
        pytest.param(["optimizer.bin"], r"extensions \['.bin'\]$", id="only a training artefact"),
        pytest.param([], r"extensions \[\]$", id="nothing"),
        pytest.param(["MODEL.SAFETENSORS"], r"\['.SAFETENSORS'\]", id="another case"),
    ],
)
def test_nothing_found_says_what_was_tried_and_what_is_there(folder: Path, names: list[str], expected: str) -> None:
    touch(folder, *names)
    with pytest.raises(CheckpointNotFoundError, match=expected) as caught:
        find_checkpoint(folder)
    assert str(caught.value).startswith(f"Cannot find any model weights with {str(folder)!r}")
    assert "*.safetensors" in str(caught.value)


def test_path_that_does_not_exist_is_said_to_be_absent(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"/nowhere': is absent"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotFoundError, match="is absent"):
        find_checkpoint(tmp_path / "file" / "below")


def test_checkpoint_without_a_single_tensor_is_refused(folder: Path, write_tensors: WriteTensors) -> None:
    write_tensors(folder / "model.safetensors", {})
    with pytest.raises(CheckpointNotFoundError, match="hold no tensor"):
        Checkpoint.open(folder)


def test_single_file_is_a_checkpoint(folder: Path) -> None:
    touch(folder, "one.safetensors", "two.safetensors")
    files = find_checkpoint(folder / "one.safetensors")
    assert (files.folder, files.files) == (folder, (folder / "one.safetensors",))
    touch(folder, "one.bin")
    assert find_checkpoint(folder / "one.bin").container == "pickle"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("w.pt", "PyTorch pickle, which the format 'pt'"),
        ("w.gguf", "GGUF, which is recognised but not served"),
        ("optimizer.bin", "what a trainer leaves"),
        ("w.txt", "extension '.txt' is unknown"),
    ],
)
def test_single_file_of_another_format_is_refused(folder: Path, name: str, expected: str) -> None:
    touch(folder, name)
    with pytest.raises(CheckpointNotFoundError, match=expected):
        find_checkpoint(folder / name)


# Things that are not files


def make_directory(path: Path) -> None:
    path.mkdir()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        # A socket's address is at most 108 bytes, less than a path of pytest's.
        os.chdir(path.parent)
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


NOT_FILES = [
    pytest.param(make_directory, "directory", id="a directory"),
    pytest.param(os.mkfifo, "FIFO", id="a FIFO"),
    pytest.param(make_socket, "socket", id="a socket"),
    pytest.param(make_loop, "cannot be read", id="a link to itself"),
]


@pytest.mark.parametrize("name", ["model.safetensors", INDEX_NAME])
@pytest.mark.parametrize(("make", "expected"), NOT_FILES)
def test_what_is_no_file_is_refused_without_waiting(
    folder: Path, name: str, make: Callable[[Path], None], expected: str
) -> None:
    make(folder / name)
    with pytest.raises(CheckpointError, match=expected):
        find_checkpoint(folder)


def test_checkpoint_path_that_is_a_fifo_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="FIFO"):
        find_checkpoint(folder / "pipe.safetensors")


def test_dead_link_is_said_to_be_one(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("gone")
    with pytest.raises(CheckpointNotFoundError, match="link whose target is absent"):
        find_checkpoint(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_that_may_not_be_read_is_said_to_be_one(folder: Path, write_tensors: WriteTensors) -> None:
    write_tensors(folder / "model.safetensors", {"a": ("F32", [2], EIGHT)}).chmod(0)
    with pytest.raises(CheckpointError, match="Permission denied"):
        Checkpoint.open(folder)


def test_message_about_an_undecodable_name_can_be_printed(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.safetensors")).symlink_to("gone")
    with pytest.raises(CheckpointNotFoundError) as caught:
        find_checkpoint(folder)
    assert str(caught.value).encode("utf-8")
    assert json.dumps(dict(caught.value.facts), ensure_ascii=False).encode("utf-8")


# L25
def test_files_that_appear_after_discovery_are_not_part_of_it(folder: Path, write_tensors: WriteTensors) -> None:
    write_tensors(folder / "a.safetensors", {"a": ("F32", [2], EIGHT)})
    with Checkpoint.open(folder) as checkpoint:
        write_tensors(folder / "b.safetensors", {"b": ("F32", [2], EIGHT)})
        assert [name for name, _ in checkpoint.iterate()] == ["a"]
        assert checkpoint.files.files == (folder / "a.safetensors",)


# L25
def test_record_is_complete_and_cannot_be_changed(folder: Path, write_tensors: WriteTensors) -> None:
    write_tensors(folder / "a.safetensors", {"a": ("F32", [2], EIGHT)})
    write_index(folder, {"a": "a.safetensors"})
    files = find_checkpoint(folder)
    assert (files.source, files.folder, files.container) == (folder, folder, "safetensors")
    with pytest.raises(dataclasses.FrozenInstanceError):
        files.files = ()  # type: ignore[misc]
    assert not hasattr(files.indexed_names, "__setitem__")
    write_tensors(folder / "b.safetensors", {"b": ("F32", [2], EIGHT)})
    (folder / INDEX_NAME).unlink()
    with Checkpoint.open_files(files) as checkpoint:
        assert list(checkpoint.entries) == ["a"]
