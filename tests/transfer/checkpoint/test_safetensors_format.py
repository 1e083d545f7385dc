"""The header parser, against the safetensors library as the oracle."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.checkpoint.safetensors_format import (
    MAX_HEADER_BYTES,
    Header,
    build_header,
    parse_header,
    parse_prefix,
)
from weightwire.transfer.dtypes import BY_TAG, Dtype, dtype_tagged
from weightwire.transfer.errors import DtypeError, HeaderError, TransferError

WHERE = "file '/m/a.safetensors'"
F32 = dtype_tagged("F32")
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 4976698672\n"


def tensor(tag: str, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": tag, "shape": shape, "data_offsets": [begin, end]}


def parse(header: object, data_bytes: int = 0) -> Header:
    """Parse a header, given as JSON or as its very bytes, of a file with that many bytes of data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(raw, file_bytes=8 + len(raw) + data_bytes, where=WHERE)


# The library gives it no types.
deserialize: Callable[[bytes], list[tuple[str, dict[str, object]]]] = safetensors.deserialize


def library_accepts(raw: bytes, data_bytes: int) -> bool:
    try:
        deserialize(len(raw).to_bytes(8, "little") + raw + bytes(data_bytes))
    except safetensors.SafetensorError:
        return False
    return True


# Prefixes


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b"\xff" * 7 + b"\x7f" + b"{}", ["9223372036854775807", "10 bytes"], id="i, a claim of 2^63-1"),
        pytest.param(LFS_POINTER, ["looks like a Git LFS pointer", "git lfs pull"], id="ii, a git-lfs pointer"),
        pytest.param(b"", ["is empty"], id="iii, an empty file"),
        pytest.param(b"\x02\x00\x00", ["is 3 bytes long", "download it again"], id="cut inside the length"),
        pytest.param(b"PK\x03\x04" + b"\0" * 60, ["zip archive", ".bin"], id="a renamed torch.save archive"),
        pytest.param(b"\x80\x02ctorch._utils", ["looks like a pickle"], id="a renamed pickle"),
        pytest.param(b"<!DOCTYPE html><html>", ["HTML"], id="an error page"),
        pytest.param(b"GGUF\x03\x00\x00\x00" + b"\0" * 8, ["GGUF"], id="a renamed GGUF file"),
        pytest.param(b'{"a":{"dtype":"F32"}}', ["without a length"], id="a header alone"),
    ],
)
def test_b05_prefix_that_cannot_be_a_length_is_refused(content: bytes, expected: list[str]) -> None:
    with pytest.raises(HeaderError) as caught:
        parse_prefix(content[:8], len(content), WHERE)
    assert str(caught.value).startswith(WHERE)
    assert all(text in str(caught.value) for text in expected)
    assert caught.value.facts["file_bytes"] == len(content)


def test_b05_prefix_states_the_claim_and_the_real_size() -> None:
    with pytest.raises(HeaderError) as caught:
        parse_prefix((2**63 - 1).to_bytes(8, "little"), 10, WHERE)
    assert caught.value.facts == {"where": WHERE, "claimed_bytes": 2**63 - 1, "file_bytes": 10}


def test_prefix_limit_is_the_librarys_and_can_be_lowered() -> None:
    at_limit = MAX_HEADER_BYTES.to_bytes(8, "little")
    assert parse_prefix(at_limit, MAX_HEADER_BYTES + 8, WHERE) == MAX_HEADER_BYTES
    with pytest.raises(HeaderError, match="at most 100000000"):
        parse_prefix((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), MAX_HEADER_BYTES + 9, WHERE)
    with pytest.raises(HeaderError, match="at most 1000"):
        parse_prefix(at_limit, MAX_HEADER_BYTES + 8, WHERE, max_header_bytes=1000)


def test_x12_file_cut_inside_its_header_names_the_file_and_says_what_to_do() -> None:
    with pytest.raises(HeaderError, match=r"/m/a\.safetensors.*500 bytes.*108 bytes.*ends inside.*download it again"):
        parse_prefix((500).to_bytes(8, "little"), 108, WHERE)


# Headers that are right


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        pytest.param({"__metadata__": {}}, {}, id="empty"),
        pytest.param({"__metadata__": None}, {}, id="null"),
        pytest.param({}, {}, id="absent"),
        pytest.param({"__metadata__": {"format": "pt"}}, {"format": "pt"}, id="filled"),
    ],
)
def test_x2_metadata_may_be_anything_that_files_have(metadata: dict[str, object], expected: dict[str, str]) -> None:
    header = parse(metadata | {"a": tensor("F32", [2], 0, 8)}, 8)
    assert header.metadata == expected
    assert header.by_name["a"].shape == (2,)


def test_header_keeps_the_files_order_and_finds_by_name() -> None:
    header = parse({"b": tensor("F32", [1], 4, 8), "a": tensor("U8", [2, 2], 0, 4)}, 8)
    assert [entry.name for entry in header.entries] == ["b", "a"]
    assert (header.by_name["b"].begin, header.by_name["b"].end, header.by_name["b"].nbytes) == (4, 8, 4)
    assert (header.data_bytes, header.file_bytes) == (8, header.data_begin + 8)


def test_b08_zero_element_tensors_lie_where_their_neighbours_meet() -> None:
    header = parse({
        "first": tensor("I32", [0], 0, 0),
        "w": tensor("F32", [4], 0, 16),
        "pad": tensor("F16", [2, 0], 16, 16),
        "last": tensor("F32", [0, 7], 16, 16),
    }, 16)  # fmt: skip
    assert [entry.shape for entry in header.entries] == [(0,), (4,), (2, 0), (0, 7)]
    assert [entry.nbytes for entry in header.entries] == [0, 16, 0, 0]


def test_b08_empty_tensor_may_be_listed_after_the_one_that_begins_at_the_same_byte() -> None:
    header = {"w": tensor("U8", [4], 0, 4), "g_idx": tensor("I32", [0], 0, 0)}
    assert parse(header, 4).by_name["g_idx"].shape == (0,)
    assert library_accepts(json.dumps(header).encode(), 4)


def test_b09_scalar_has_the_empty_shape() -> None:
    assert parse({"k_scale": tensor("F32", [], 0, 4)}, 4).by_name["k_scale"].shape == ()


def test_b10_packed_dtype_counts_logical_values_in_the_file_and_elements_here() -> None:
    entry = parse({"q": tensor("F4", [2, 8], 0, 8)}, 8).by_name["q"]
    assert (entry.shape, entry.nbytes) == ((2, 4), 8)


def test_b11_data_section_may_begin_anywhere() -> None:
    raw = json.dumps({"a": tensor("F32", [2], 0, 8)}).encode()
    raw += b" " * ((1 - len(raw)) % 8)
    assert parse(raw, 8).data_begin % 8 == 1


@pytest.mark.parametrize("name", ["", "a/b", "a b", "\x00\n", "層.重み", "😀", "..", "x" * 10_000])
def test_names_may_be_any_text(name: str) -> None:
    prefix, built = build_header([(name, F32, (1,))])
    assert parse(prefix[8:], 4) == built
    assert built.entries[0].name == name


# Headers that lie


@pytest.mark.parametrize(
    ("shape", "end", "data_bytes", "expected"),
    [
        pytest.param([2], 8, 4, "takes 8 bytes, but only 4 are there", id="truncated"),
        pytest.param([2], 8, 12, "at byte 8, but 12 bytes are there", id="oversized"),
        pytest.param([16, 32], 512, 512, "span 512 bytes, expected 2048", id="shape and range differ"),
    ],
)
def test_b06_payload_that_does_not_fit_names_file_tensor_and_bytes(
    shape: list[int], end: int, data_bytes: int, expected: str
) -> None:
    with pytest.raises(HeaderError) as caught:
        parse({"a": tensor("F32", shape, 0, end)}, data_bytes)
    assert str(caught.value).startswith(WHERE)
    assert "'a'" in str(caught.value)
    assert expected in str(caught.value)
    assert caught.value.facts["tensor"] == "a"
    assert caught.value.facts["expected_bytes"] != caught.value.facts["actual_bytes"]


def test_b06_truncated_file_names_the_first_tensor_in_it_that_is_cut() -> None:
    header = {"c": tensor("U8", [4], 8, 12), "b": tensor("U8", [4], 4, 8), "a": tensor("U8", [4], 0, 4)}
    with pytest.raises(HeaderError, match="'b' takes 4 bytes, but only 1 are there"):
        parse(header, 5)


def test_b10_unknown_tag_is_named_with_its_tensor() -> None:
    with pytest.raises(DtypeError, match=r"'w'.*'F6_E2M3'") as caught:
        parse({"w": tensor("F6_E2M3", [4], 0, 3)}, 3)
    assert caught.value.facts["dtype"] == "'F6_E2M3'"


@pytest.mark.parametrize("shape", [[3], [2, 3], [], [0, 1]])
def test_b10_odd_packed_shape_is_refused(shape: list[int]) -> None:
    with pytest.raises(DtypeError, match="'q'"):
        parse({"q": tensor("F4", shape, 0, 2)}, 2)


@pytest.mark.parametrize(
    ("header", "data_bytes", "expected"),
    [
        pytest.param(b"", 0, "not JSON", id="nothing at all"),
        pytest.param(b"        ", 0, "not JSON", id="spaces only"),
        pytest.param(b"[]", 0, "is a list", id="a list"),
        pytest.param(b"null", 0, "is a NoneType", id="null"),
        pytest.param(b"\xef\xbb\xbf{}", 0, "not JSON", id="a byte order mark"),
        pytest.param(b'{"\xff": 1}', 0, "not JSON", id="invalid UTF-8"),
        pytest.param(b'{"\xed\xa0\x80": 1}', 0, "not JSON", id="a surrogate in UTF-8"),
        pytest.param(b"{}\0\0", 0, "not JSON", id="padded with NUL"),
        pytest.param(b"[" * 100_000, 0, "nested too deeply", id="a hundred thousand open brackets"),
        pytest.param(b'{"a":' * 100_000, 0, "nested too deeply", id="a hundred thousand open braces"),
        pytest.param(b'{"a":1,"a":1}', 0, "'a' occurs twice", id="a name twice"),
        pytest.param(
            b'{"a":{"dtype":"F32","dtype":"U8","shape":[],"data_offsets":[0,4]}}', 4, "'dtype' occurs twice",
            id="a member twice",
        ),
        pytest.param(b'{"__metadata__":{},"__metadata__":{}}', 0, "occurs twice", id="metadata twice"),
        pytest.param(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1, "Unicode", id="a surrogate"),
        pytest.param({"__metadata__": []}, 0, "__metadata__", id="metadata is a list"),
        pytest.param({"__metadata__": {"x": 1}}, 0, "'x' is 1", id="metadata that is no string"),
        pytest.param(b'{"__metadata__":{"x":"\\udfff"}}', 0, "Unicode", id="metadata with half a surrogate"),
        pytest.param({"a": 1}, 0, "'a'", id="an entry that is a number"),
        pytest.param({"a": {}}, 0, "dtype is None", id="an empty entry"),
        pytest.param({"a": {"dtype": ["F32"], "shape": [], "data_offsets": [0, 4]}}, 4, "dtype", id="dtype is a list"),
        pytest.param({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4, "shape is None", id="no shape"),
        pytest.param({"a": {"dtype": "F32", "shape": [1]}}, 4, "data_offsets is None", id="no offsets"),
        pytest.param({"a": tensor("F32", [True], 0, 4)}, 4, "shape", id="a bool in the shape"),
        pytest.param({"a": tensor("F32", [1.0], 0, 4)}, 4, "shape", id="a float in the shape"),
        pytest.param({"a": tensor("F32", [-1], 0, 4)}, 4, "shape", id="a negative size"),
        pytest.param({"a": tensor("F32", "1", 0, 4)}, 4, "shape", id="a shape that is text"),
        pytest.param(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', 0, "shape", id="minus zero"),
        pytest.param(b'{"a":{"dtype":"U8","shape":[1e400],"data_offsets":[0,0]}}', 0, "shape", id="1e400"),
        pytest.param(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}', 0, "NaN", id="NaN"),
        pytest.param(b'{"a":{"dtype":"U8","shape":[-Infinity],"data_offsets":[0,0]}}', 0, "Infinity", id="infinity"),
        pytest.param(
            b'{"a":{"dtype":"U8","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,0]}}', 0, "shape",
            id="a number of a hundred thousand digits",
        ),
        pytest.param({"a": tensor("F32", [2**62, 8], 0, 0)}, 0, "overflows", id="a product that overflows"),
        pytest.param({"a": tensor("F32", [2**62, 8, 0], 0, 0)}, 0, "overflows", id="an overflow hidden by a zero"),
        pytest.param({"a": tensor("F32", [0, 2**62, 8], 0, 0)}, 0, "overflows", id="an overflow behind a zero"),
        pytest.param({"a": tensor("F32", [1], 4, 0)}, 4, "the end not before", id="offsets backwards"),
        pytest.param({"a": tensor("F32", [1], -4, 0)}, 4, "data_offsets", id="a negative offset"),
        pytest.param({"a": tensor("F32", [1], 0, 4.0)}, 4, "data_offsets", id="a float offset"),
        pytest.param({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 2, 4]}}, 4, "two", id="three offsets"),
        pytest.param({"a": tensor("F32", [1], 4, 8)}, 8, "hole", id="a hole at the start"),
        pytest.param({"a": tensor("U8", [1], 0, 1), "b": tensor("U8", [1], 2, 3)}, 3, "hole", id="a hole between"),
        pytest.param({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 2, 6)}, 6, "overlaps", id="an overlap"),
        pytest.param({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 0, 4)}, 4, "overlaps", id="the same bytes"),
        pytest.param({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [0], 2, 2)}, 4, "overlaps", id="an empty inside"),
        pytest.param({"a": tensor("U8", [0], 9, 9)}, 0, "hole", id="an empty one beyond the end"),
        pytest.param({}, 1, "without tensors", id="data that nobody owns"),
    ],
)  # fmt: skip
def test_malformed_header_is_refused_as_the_library_does(header: object, data_bytes: int, expected: str) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    with pytest.raises(HeaderError) as caught:
        parse(raw, data_bytes)
    assert str(caught.value).startswith(WHERE)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 2000
    # A key twice, and sizes that only overflow in torch, are all that the library lets pass.
    if "twice" not in expected and expected != "overflows":
        assert not library_accepts(raw, data_bytes)


def test_header_without_tensors_in_a_file_that_ends_inside_it_is_refused() -> None:
    with pytest.raises(HeaderError, match="without tensors"):
        parse_header(b"{}", file_bytes=5, where=WHERE)


def test_members_that_nobody_knows_are_passed_over_as_the_library_does() -> None:
    entry = tensor("F32", [1], 0, 4) | {"note": {"deep": [1.5, None]}}
    assert parse({"a": entry}, 4).by_name["a"].nbytes == 4
    assert library_accepts(json.dumps({"a": entry}).encode(), 4)


def test_hostile_text_does_not_flood_the_message() -> None:
    with pytest.raises(HeaderError) as caught:
        parse({"n" * 1_000_000: tensor("F32", [7] * 100_000, 0, 4)}, 4)
    assert len(str(caught.value)) < 2000


def test_header_that_is_all_brackets_takes_memory_in_proportion() -> None:
    raw = b'{"a":[' + b"{}," * 300_000 + b"0]}"
    tracemalloc.start()
    with pytest.raises(HeaderError):
        parse(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * len(raw)


# Building


@pytest.mark.parametrize(
    ("entries", "metadata", "expected"),
    [
        pytest.param([("a", F32, (1,)), ("a", F32, (1,))], None, "twice", id="a name twice"),
        pytest.param([("__metadata__", F32, (1,))], None, "reserved", id="the reserved name"),
        pytest.param([("\ud800", F32, (1,))], None, "Unicode", id="half a surrogate"),
        pytest.param([("a", F32, (-1,))], None, "shape", id="a negative size"),
        pytest.param([("a", F32, (2**62, 4))], None, "overflows", id="a product that overflows"),
        pytest.param([], {"a": "\ud800"}, "Unicode", id="metadata with half a surrogate"),
    ],
)
def test_build_header_refuses_what_no_file_can_hold(
    entries: list[tuple[str, Dtype, tuple[int, ...]]], metadata: dict[str, str] | None, expected: str
) -> None:
    with pytest.raises(HeaderError, match=expected):
        build_header(entries, metadata)


def test_build_header_refuses_a_packed_scalar() -> None:
    with pytest.raises(DtypeError, match="'q'"):
        build_header([("q", dtype_tagged("F4"), ())])


def test_build_header_keeps_the_given_order_and_begins_the_data_at_a_multiple_of_eight() -> None:
    prefix, header = build_header([("b", F32, (3,)), ("a", BY_TAG["U8"], (2,))], {"format": "pt"})
    assert [(entry.name, entry.begin, entry.end) for entry in header.entries] == [("b", 0, 12), ("a", 12, 14)]
    assert len(prefix) == header.data_begin
    assert len(prefix) % 8 == 0
    assert struct.unpack("<Q", prefix[:8]) == (len(prefix) - 8,)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
ENTRIES = st.lists(
    st.tuples(TEXT.filter(lambda name: name != "__metadata__"), st.sampled_from(list(BY_TAG.values())), SHAPES).filter(
        lambda entry: entry[1].packing == 1 or bool(entry[2])
    ),
    max_size=6,
    unique_by=lambda entry: entry[0],
)


@given(entries=ENTRIES, metadata=st.dictionaries(TEXT, TEXT, max_size=3))
def test_built_header_parses_to_itself_and_the_library_agrees(
    entries: list[tuple[str, Dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    prefix, built = build_header(entries, metadata)
    raw = prefix[8 : 8 + parse_prefix(prefix[:8], built.file_bytes, WHERE)]
    assert parse_header(raw, file_bytes=built.file_bytes, where=WHERE) == built
    found = dict(deserialize(prefix + bytes(built.data_bytes)))
    assert {name: (info["dtype"], info["shape"], info["data"]) for name, info in found.items()} == {
        entry.name: (entry.dtype.tag, list(entry.dtype.logical_shape(entry.shape)), bytes(entry.nbytes))
        for entry in built.entries
    }


DAMAGES = [b'"', b"{", b"[", b"-0", b"1e999", b"9" * 25, b"null", b"NaN", b"\\ud800", b",0", b"F4", b"\\", b"\xff"]


def _damage(raw: bytes, position: int, cut: int, filling: bytes) -> bytes:
    at = position % (len(raw) + 1)
    return raw[:at] + filling + raw[at + cut :]


@given(
    entries=ENTRIES,
    damages=st.lists(
        st.tuples(
            st.integers(0, 10_000),
            st.integers(0, 12),
            st.one_of(
                st.binary(max_size=6),
                st.sampled_from(DAMAGES),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    length_error=st.integers(-3, 3),
)
def test_damaged_header_is_a_header_that_the_library_accepts_or_a_typed_error(
    entries: list[tuple[str, Dtype, tuple[int, ...]]], damages: list[tuple[int, int, bytes]], length_error: int
) -> None:
    prefix, built = build_header(entries)
    raw = prefix[8:]
    for damage in damages:
        raw = _damage(raw, *damage)
    data_bytes = max(built.data_bytes + length_error, 0)
    try:
        header = parse(raw, data_bytes)
    except TransferError:
        return
    assert header.data_bytes == data_bytes
    assert library_accepts(raw, data_bytes)


@given(content=st.binary(max_size=64))
def test_file_of_arbitrary_bytes_is_refused_or_read_within_itself(content: bytes) -> None:
    try:
        length = parse_prefix(content[:8], len(content), WHERE)
        assert length <= len(content) - 8
        parse_header(content[8 : 8 + length], file_bytes=len(content), where=WHERE)
    except TransferError:
        return
    deserialize(content)


def test_errors_of_a_stream_name_the_stream() -> None:
    where = "source 'http://127.0.0.1:9/v1/export.safetensors'"
    with pytest.raises(HeaderError, match=r"^source 'http://127\.0\.0\.1:9"):
        parse_prefix(b"\xff" * 8, 100, where)


def test_oracle_reads_what_is_built_here(tmp_path: Path) -> None:
    prefix, header = build_header([("a", F32, (2,))], {"format": "pt"})
    path = tmp_path / "a.safetensors"
    path.write_bytes(prefix + struct.pack("<2f", 1, 2))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("a").tolist() == [1, 2]
    assert path.stat().st_size == header.file_bytes
