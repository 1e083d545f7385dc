"""Manifests: one text and one address for one value, and nothing that contradicts itself."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from weightwire.transfer.errors import ManifestError, RegionError
from weightwire.transfer.layouts import plain_entry
from weightwire.transfer.manifest import (
    MAX_CHUNK_BYTES,
    CheckpointSpec,
    Manifest,
    TensorEntry,
    Topology,
    chunk_bounds,
    layout_fingerprint,
)
from weightwire.transfer.placement import PlacedConstant, PlacedPiece, place_whole
from weightwire.transfer.regions import Region, row_major

SIZES = st.lists(st.integers(0, 40), max_size=12)
VALUES = st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, 1e-320])
NAMES = st.text(min_size=1, max_size=6) | st.sampled_from(["a/b", "a b", "ü", "\ud800", "a\\", '"', "\x00"])


@st.composite
def placed(draw: st.DrawFn, entry: TensorEntry, specs: list[CheckpointSpec]) -> TensorEntry:
    """With pieces and constants: rows of the tensor, each from somewhere, of a few patterns that come again."""
    pieces, constants = list[PlacedPiece](), list[PlacedConstant]()
    for row in range(entry.shape[0] if entry.shape else 0):
        runtime = Region(offset=row * entry.strides[0], shape=entry.shape[1:], strides=entry.strides[1:])
        spec = draw(st.sampled_from(specs))
        if not runtime.numel:
            continue
        if draw(st.booleans()):
            constants.append(PlacedConstant(runtime=runtime, value=draw(VALUES)))
        elif runtime.numel <= (numel := math.prod(spec.shape)):
            checkpoint = row_major(runtime.shape, offset=draw(st.integers(0, numel - runtime.numel)))
            pieces.append(PlacedPiece.of(spec.name, checkpoint=checkpoint, runtime=runtime))
    return replace(entry, placement=tuple(pieces), constants=tuple(constants))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Manifests with and without digests, with aliases, strides, empty tensors, and placements of every kind."""
    specs = [
        CheckpointSpec(name=name, dtype=draw(st.sampled_from(["float32", "uint8", "bfloat16"])), shape=shape)
        for name in draw(st.lists(NAMES, max_size=4, unique=True))
        for shape in [tuple(draw(st.lists(st.integers(0, 3), max_size=3)))]
    ]
    plain = [plain_entry(spec, storage=number) for number, spec in enumerate(specs)]
    entries = [draw(st.just(entry) | placed(entry, specs)) for entry in plain]
    tied = draw(st.booleans())
    if entries and tied:
        first = entries[0]
        entries.append(replace(first, name="tied", kind="buffer", state="final", digest="00112233aabbccdd"))
        transposed = replace(first, shape=first.shape[::-1], strides=first.strides[::-1], placement=(), constants=())
        entries.append(replace(transposed, name="transposed"))
    chunk_bytes = draw(st.integers(1, 16))
    storages = [
        math.prod(spec.shape) * entry.itemsize + draw(st.integers(0, 3))
        for spec, entry in zip(specs, entries, strict=False)
    ]
    chunks = len(chunk_bounds(storages, chunk_bytes=chunk_bytes)) - 1
    return Manifest(
        model=draw(st.sampled_from(["org/name", "", "ü"])),
        revision="r",
        storages=tuple(storages),
        tensors=tuple(entries),
        topology=Topology(tp=4, pp=2, ep=2),
        rank=draw(st.integers(0, 7)),
        chunk_bytes=chunk_bytes,
        chunk_digests=draw(st.sampled_from([b"", bytes(range(8)) * chunks])),
        config=draw(st.none() | st.text(max_size=5)),
        checkpoint=tuple(specs),
    )


def entry(**changes: object) -> TensorEntry:
    base = TensorEntry(name="t", dtype="float32", shape=(2, 2), strides=(2, 1), storage=0, offset=0, layout="l")
    return replace(base, **changes)  # type: ignore[arg-type]


def one(**changes: object) -> Manifest:
    base = Manifest(model="m", revision="r", storages=(16,), tensors=(entry(),))
    return replace(base, **changes)  # type: ignore[arg-type]


SIMPLE = Manifest(
    model="m",
    revision="r",
    storages=(16, 3),
    tensors=(
        entry(placement=place_whole("t", row_major((2, 2)))),
        entry(name="s", dtype="uint8", shape=(2,), strides=(2,), storage=1, digest="0123456789abcdef"),
    ),
    chunk_bytes=8,
    chunk_digests=bytes(24),
    config="{}",
    checkpoint=(CheckpointSpec(name="t", dtype="float32", shape=(2, 2)),),
)


Json = dict[str, object]

# One text, one address


@given(manifests())
def test_text_round_trip(manifest: Manifest) -> None:
    again = Manifest.from_text(manifest.text, digest=manifest.digest)
    assert again == manifest
    assert again.text == manifest.text
    assert manifest.digest == hashlib.sha256(manifest.text).hexdigest()


@given(manifests(), st.randoms(use_true_random=False))
def test_text_does_not_depend_on_the_order_or_the_spaces_of_the_json_it_was_read_from(
    manifest: Manifest, random: object
) -> None:
    def shuffled(value: object) -> object:
        if isinstance(value, dict):
            items = list(value.items())
            random.shuffle(items)  # type: ignore[attr-defined]
            return {key: shuffled(member) for key, member in items}
        return [shuffled(member) for member in value] if isinstance(value, list) else value

    loose = json.dumps(shuffled(json.loads(manifest.text)), indent=1).encode()
    assert Manifest.from_text(loose).text == manifest.text


def test_digest_of_a_known_manifest_stays_what_it_is() -> None:
    """A change here is a new format: sources and targets of two releases would not find each other's manifests."""
    assert SIMPLE.digest == hashlib.sha256(SIMPLE.text).hexdigest()
    assert SIMPLE.text.decode() == (
        '{"checkpoint":[["t","float32",[2,2]]],"chunk_bytes":8,"chunk_digests":"' + "0" * 48 + '","config":"{}",'
        '"format":2,"model":"m","patterns":[[[4],[1],[1]]],"rank":0,"revision":"r","storages":[16,3],"tensors":['
        '{"digest":"","dtype":"float32","kind":"parameter","layout":"l","name":"t","offset":0,'
        '"placement":[["t",0,0,0]],"shape":[2,2],"state":"placed","storage":0},'
        '{"digest":"0123456789abcdef","dtype":"uint8","kind":"parameter","layout":"l","name":"s","offset":0,'
        '"placement":[],"shape":[2],"state":"placed","storage":1,"strides":[2]}],"topology":{"ep":1,"pp":1,"tp":1}}'
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"model": "n"}, id="model"),
        pytest.param({"revision": "s"}, id="revision"),
        pytest.param({"storages": (17,)}, id="storage"),
        pytest.param({"tensors": (entry(name="u"),)}, id="name"),
        pytest.param({"tensors": (entry(dtype="int32"),)}, id="dtype"),
        pytest.param({"tensors": (entry(strides=(1, 2)),)}, id="strides"),
        pytest.param({"tensors": (entry(layout="k"),)}, id="layout"),
        pytest.param({"tensors": (entry(kind="buffer"),)}, id="kind"),
        pytest.param({"tensors": (entry(state="final"),)}, id="state"),
        pytest.param({"tensors": (entry(digest="0" * 16),)}, id="tensor digest"),
        pytest.param({"chunk_digests": bytes(8)}, id="chunk digests"),
        pytest.param({"chunk_bytes": 8}, id="chunk size"),
        pytest.param({"topology": Topology(tp=2)}, id="topology"),
        pytest.param({"topology": Topology(tp=2), "rank": 1}, id="rank"),
        pytest.param({"config": ""}, id="config"),
        pytest.param({"checkpoint": SIMPLE.checkpoint}, id="checkpoint"),
    ],
)
def test_digest_changes_with(change: dict[str, object]) -> None:
    assert one(**change).digest != one().digest


def test_text_with_another_digest_is_refused() -> None:
    with pytest.raises(ManifestError, match="its bytes hash to"):
        Manifest.from_text(SIMPLE.text, digest="0" * 64)


def test_text_that_is_not_canonical_has_no_address() -> None:
    loose = SIMPLE.text + b"\n"
    assert Manifest.from_text(loose) == SIMPLE
    with pytest.raises(ManifestError, match="canonical"):
        Manifest.from_text(loose, digest=hashlib.sha256(loose).hexdigest())


# Patterns and constants


PLACED = Manifest(
    model="m",
    revision="r",
    storages=(64, 32),
    tensors=(
        entry(
            name="qkv",
            shape=(4, 4),
            strides=(4, 1),
            placement=(
                PlacedPiece.of("q", checkpoint=row_major((2, 4), offset=8), runtime=row_major((2, 4))),
                PlacedPiece.of("k", checkpoint=row_major((4,), offset=4), runtime=row_major((4,), offset=8)),
            ),
            constants=(PlacedConstant(runtime=row_major((4,), offset=12), value=-0.0),),
        ),
        entry(
            name="o",
            shape=(4, 2),
            storage=1,
            placement=(
                PlacedPiece.of(
                    "o", checkpoint=Region(offset=2, shape=(2, 2), strides=(4, 1)), runtime=row_major((2, 2))
                ),
                PlacedPiece.of("k", checkpoint=row_major((4,)), runtime=row_major((4,), offset=4)),
            ),
        ),
    ),
)  # fmt: skip


def text_of(edit: Callable[[Json], object], manifest: Manifest = PLACED) -> bytes:
    """A canonical text, but for what is edited."""
    value = json.loads(manifest.text)
    edit(value)
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def parts(value: Json, *path: str | int) -> list[object]:
    """A list within a JSON value."""
    node: object = value
    for key in path:
        node = node[key]  # type: ignore[index]
    assert isinstance(node, list)
    return node


def test_pattern_that_pieces_share_is_written_once_and_numbered_as_it_comes() -> None:
    value = json.loads(PLACED.text)
    assert value["patterns"] == [[[8], [1], [1]], [[4], [1], [1]], [[2, 2], [4, 1], [2, 1]]]
    assert [tensor["placement"] for tensor in value["tensors"]] == [
        [["q", 8, 0, 0], ["k", 4, 8, 1]], [["o", 2, 0, 2], ["k", 0, 4, 1]],
    ]  # fmt: skip
    assert value["tensors"][0]["constants"] == [[[12, [4], [1]], "-0x0.0p+0"]]
    assert "constants" not in value["tensors"][1]
    again = Manifest.from_text(PLACED.text, digest=PLACED.digest)
    assert again == PLACED
    # One object for each, so that thousands of pieces are told apart by a glance.
    assert again.tensors[0].placement[1].pattern is again.tensors[1].placement[1].pattern


def test_text_has_the_sign_of_a_zero() -> None:
    first = PLACED.tensors[0]
    plus = replace(first, constants=(replace(first.constants[0], value=0.0),))
    other = replace(PLACED, tensors=(plus, PLACED.tensors[1]))
    assert other != PLACED
    assert other.digest != PLACED.digest


@given(st.integers(1, 400), st.integers(1, 4))
def test_text_grows_by_a_few_bytes_for_each_expert(experts: int, patterns: int) -> None:
    """Hundreds of experts, each of some pieces: what is long about a piece is written once."""
    rows, columns = patterns * 1000, 4096
    pieces = tuple(
        PlacedPiece.of(
            f"e{expert}.w{number}",
            checkpoint=Region(offset=number, shape=(rows, columns // 2), strides=(columns, 1)),
            runtime=Region(
                offset=(expert * patterns + number) * rows * columns, shape=(rows, columns // 2), strides=(columns, 1)
            ),
        )
        for expert in range(experts)
        for number in range(patterns)
    )
    numel = experts * patterns * rows * columns
    wide = TensorEntry(
        name="w13", dtype="bfloat16", shape=(numel,), strides=(1,), storage=0, offset=0, layout="l", placement=pieces
    )
    manifest = Manifest(model="m", revision="r", storages=(2 * numel,), tensors=(wide,))
    assert len(json.loads(manifest.text)["patterns"]) == 1
    assert len(manifest.text) <= 600 + 40 * len(pieces)
    assert Manifest.from_text(manifest.text, digest=manifest.digest) == manifest


def use_a_pattern_twice(value: Json) -> None:
    parts(value, "patterns").append([[8], [1], [1]])
    parts(value, "tensors", 0, "placement", 0)[3] = 3


def number_patterns_from_the_last(value: Json) -> None:
    parts(value, "patterns").reverse()
    for tensor, piece in itertools.product((0, 1), (0, 1)):
        placement = parts(value, "tensors", tensor, "placement", piece)
        placement.append(2 - int(str(placement.pop())))


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda v: parts(v, "patterns").append([[3], [1], [1]]), id="a pattern that no piece has"),
        pytest.param(lambda v: parts(v, "patterns").extend([[[3], [1], [1]]] * 2), id="more patterns than pieces"),
        pytest.param(use_a_pattern_twice, id="a pattern twice"),
        pytest.param(number_patterns_from_the_last, id="patterns in another order"),
        pytest.param(lambda v: v["tensors"][1].update(constants=[]), id="no constants, at length"),
        pytest.param(lambda v: v["tensors"][0].update(strides=[4, 1]), id="strides that say nothing"),
    ],
)
def test_text_that_says_the_same_otherwise_has_no_address(edit: Callable[[Json], object]) -> None:
    loose = text_of(edit)
    assert loose != PLACED.text
    with pytest.raises(ManifestError, match=r"canonical|no more"):
        Manifest.from_text(loose, digest=hashlib.sha256(loose).hexdigest())


@pytest.mark.parametrize("pattern", [
    pytest.param([[2, 4], [4, 1], [4, 1]], id="dimensions that are one"),
    pytest.param([[8, 1], [1, 1], [1, 1]], id="a dimension of one"),
    pytest.param([[8, 0], [1, 1], [1, 1]], id="no elements, at length"),
    pytest.param([[2, 2], [1, 4], [1, 2]], id="not in the order of the checkpoint"),
    pytest.param([[8], [1]], id="no strides in the storage"),
    pytest.param([[8], [1, 1], [1]], id="a stride too many"),
    pytest.param([[8], [1], [True]], id="a boolean for a stride"),
    pytest.param([[8.0], [1], [1]], id="a float for a size"),
    pytest.param([[-8], [1], [1]], id="a negative size"),
    pytest.param([[8], [1], [-1]], id="a negative stride"),
    pytest.param([[2**63], [0], [1]], id="a size past what can be addressed"),
    pytest.param([[8], [2**61], [1]], id="a reach past what can be addressed"),
    pytest.param([[2] * 64, [0] * 64, [0] * 64], id="more elements than can be addressed"),
    pytest.param({"0": 1}, id="no list"),
    pytest.param(None, id="nothing"),
])  # fmt: skip
def test_pattern_is_refused_with(pattern: object) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_text(text_of(lambda value: parts(value, "patterns").__setitem__(0, pattern)))


@pytest.mark.parametrize("piece", [
    pytest.param(["q", True, 0, 0], id="a boolean for an offset in the checkpoint"),
    pytest.param(["q", 8, False, 0], id="a boolean for an offset in the storage"),
    pytest.param(["q", 8, 0, True], id="a boolean for a pattern"),
    pytest.param(["q", 8, 0, -1], id="a negative pattern"),
    pytest.param(["q", 8, 0, 3], id="a pattern that there is not"),
    pytest.param(["q", 8, 0, 10**30], id="a pattern far beyond"),
    pytest.param(["q", 8, 0, 0.0], id="a float for a pattern"),
    pytest.param(["q", -1, 0, 0], id="an offset before the tensor"),
    pytest.param(["q", 8, -1, 0], id="an offset before the storage"),
    pytest.param(["q", 2**63 - 1, 0, 0], id="an offset past what can be addressed"),
    pytest.param(["q", 10**400, 0, 0], id="an offset of four hundred digits"),
    pytest.param(["q", 8, 9, 0], id="past its storage"),
    pytest.param([1, 8, 0, 0], id="a number for a name"),
    pytest.param(["q", 8, 0], id="no pattern"),
    pytest.param(["q", 8, 0, 0, 0], id="one member too many"),
    pytest.param("q800", id="text"),
    pytest.param({"name": "q"}, id="an object"),
])  # fmt: skip
def test_piece_is_refused_with(piece: object) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_text(text_of(lambda value: parts(value, "tensors", 0, "placement").__setitem__(0, piece)))


@pytest.mark.parametrize("constant", [
    pytest.param([[12, [4], [1]], "nan"], id="not a number"),
    pytest.param([[12, [4], [1]], 0.0], id="a number that is not hexadecimal"),
    pytest.param([[12, [4], [1]], "0.0"], id="another way to write it"),
    pytest.param([[12, [4], [1]], "0X0.0P+0"], id="capitals"),
    pytest.param([[12, [4], [1]], " 0x0.0p+0"], id="a blank"),
    pytest.param([[12, [4], [1]], "Infinity"], id="infinity at length"),
    pytest.param([[12, [4], [1]], "0x1p+5000"], id="larger than any"),
    pytest.param([[12, [4], [0]], "0x0.0p+0"], id="one element again and again"),
    pytest.param([[13, [4], [1]], "0x0.0p+0"], id="past its storage"),
    pytest.param([[True, [4], [1]], "0x0.0p+0"], id="a boolean for an offset"),
    pytest.param([[12, [4], [1]]], id="no value"),
    pytest.param(None, id="nothing"),
])  # fmt: skip
def test_constant_is_refused_with(constant: object) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_text(text_of(lambda value: value["tensors"][0].update(constants=[constant])))  # type: ignore[index]


def test_patterns_without_number_are_refused_before_one_is_looked_at() -> None:
    text = text_of(lambda value: value.update(patterns=[None] * 1_000_000))
    with pytest.raises(ManifestError, match="1000000 patterns for 4 pieces of placements, expected no more"):
        Manifest.from_text(text)


def test_whole_tensors_are_those_that_are_all_of_the_checkpoints_of_their_name() -> None:
    whole = entry(name="w", placement=place_whole("w", row_major((2, 2))))
    padded = replace(whole, constants=(PlacedConstant(runtime=row_major((1,)), value=0.0),))
    spec = CheckpointSpec(name="w", dtype="float32", shape=(2, 2))
    assert one(tensors=(whole,)).whole == one(tensors=(whole,), checkpoint=(spec,)).whole == {"w"}
    # The checkpoint has more of it, or has it otherwise, or the shell is more than it.
    assert one(tensors=(whole,), checkpoint=(replace(spec, shape=(4, 2)),)).whole == set()
    assert one(tensors=(whole,), checkpoint=(replace(spec, shape=(4,)),)).whole == set()
    assert one(tensors=(padded,)).whole == one(tensors=(replace(whole, name="x"),)).whole == set()
    assert one(tensors=(entry(name="w"),)).whole == set()


# Whatever else is refused, by a typed error


def _members(node: object) -> Iterator[tuple[dict[str, object] | list[object], str | int]]:
    """Every member of a JSON value, as the container that holds it and its key or index."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, member in list(items):
        assert isinstance(node, (dict, list))
        yield node, key
        yield from _members(member)


@st.composite
def damaged_texts(draw: st.DrawFn) -> bytes:
    """The text of a manifest with one value exchanged, one member dropped or added, or some bytes changed."""
    value = json.loads(draw(st.sampled_from([SIMPLE.text, PLACED.text, PLACED.text, one().text])))
    for _ in range(draw(st.integers(1, 3))):
        parent, key = draw(st.sampled_from(list(_members(value))))
        if isinstance(parent, list) and isinstance(key, int):
            parent[key] = copy.deepcopy(draw(ODD))
        elif isinstance(parent, dict) and isinstance(key, str):
            if draw(st.integers(0, 4)):
                parent[key] = copy.deepcopy(draw(ODD))
            else:
                del parent[key]
    text = bytearray(json.dumps(value).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(0, 1))):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
    return bytes(text)


ODD: st.SearchStrategy[object] = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, 1.5, "", "float32", "x", "0" * 16, "ff" * 8),
        *([0], [[0]], [-1], {"x": 1}, [2**62, 2**62], "\ud800", [0, [1], [1]], list[int](), dict[str, int]()),
        *(["t", 0, 0, 0], ["t", 0, 0, 1], [[2], [1], [1]], [[0, [2], [1]], "0x0.0p+0"], "-inf", "nan"),
    ]
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(damaged_texts())
def test_damaged_text_is_a_manifest_or_a_manifest_error(text: bytes) -> None:
    try:
        manifest = Manifest.from_text(text)
    except ManifestError:
        return
    assert Manifest.from_text(manifest.text, digest=manifest.digest) == manifest
    for tensor in manifest.tensors:
        assert manifest.flat_region(tensor).end <= manifest.total_bytes


@given(st.binary(max_size=20) | st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"[]")
@example(b"null")
@example(b'"x"')
@example(b"{}")
@example(b"\xff\xfe{\x00}\x00")
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"1" * 10_000)
@example(b'{"format":NaN}')
def test_arbitrary_bytes_are_a_manifest_error(text: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_text(text)


def test_short_text_that_claims_a_huge_flat_space_takes_no_memory() -> None:
    value = json.loads(one().text)
    value |= {"storages": [2**62], "chunk_bytes": 1, "chunk_digests": "00" * 8}
    with pytest.raises(ManifestError, match="chunk digests"):
        Manifest.from_text(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda: one(tensors=(entry(), entry())), "listed twice", id="a name twice"),
        pytest.param(lambda: one(tensors=(entry(storage=1),)), "storage 1 of 1", id="no such storage"),
        pytest.param(lambda: one(tensors=(entry(storage=-1),)), "storage -1", id="storage before the first"),
        pytest.param(lambda: one(tensors=(entry(offset=1),)), "byte 20 of a storage of 16", id="past its storage"),
        pytest.param(lambda: one(tensors=(entry(shape=(2, 3)),)), "strides", id="elements overlap"),
        pytest.param(lambda: one(tensors=(entry(strides=(0, 1)),)), "overlap", id="expanded"),
        pytest.param(
            lambda: one(tensors=(entry(shape=(0,), strides=(1,), offset=2**61),)), "storage of 16", id="empty, far out"
        ),
        pytest.param(
            lambda: one(tensors=(entry(placement=place_whole("t", row_major((5,)))),)), "placement", id="placed outside"
        ),
        pytest.param(lambda: one(storages=(-1,)), "negative", id="negative storage"),
        pytest.param(lambda: one(storages=(16, 2**63)), r"2\^63", id="more bytes than can be addressed"),
        pytest.param(lambda: one(rank=1), "rank 1 of a world of 1", id="rank outside the world"),
        pytest.param(lambda: one(rank=-1), "rank -1", id="negative rank"),
        pytest.param(lambda: one(chunk_bytes=0), "chunk_bytes", id="no chunk size"),
        pytest.param(lambda: one(chunk_bytes=MAX_CHUNK_BYTES + 1), "chunk_bytes", id="chunks too large"),
        pytest.param(lambda: one(chunk_digests=bytes(16)), "2 chunk digests", id="too many digests"),
        pytest.param(lambda: one(chunk_digests=bytes(7)), "0.875 chunk digests", id="half a digest"),
        pytest.param(lambda: one(chunk_digests=bytes(8), chunk_bytes=4), "at least 4", id="too few digests"),
        pytest.param(lambda: entry(dtype="float3"), "float3", id="dtype that nobody knows"),
        pytest.param(lambda: entry(kind="weight"), "weight", id="kind that nobody knows"),
        pytest.param(lambda: entry(state="raw"), "raw", id="state that nobody knows"),
        pytest.param(lambda: entry(digest="0" * 15), "16 hex digits", id="tensor digest too short"),
        pytest.param(lambda: entry(digest="0" * 15 + "A"), "16 hex digits", id="tensor digest in capitals"),
        pytest.param(lambda: entry(digest="0" * 16 + "\n"), "16 hex digits", id="tensor digest with a line end"),
        pytest.param(lambda: CheckpointSpec(name="t", dtype="x", shape=()), "'t'", id="spec of unknown dtype"),
        pytest.param(lambda: CheckpointSpec(name="t", dtype="int8", shape=(-1,)), "'t'", id="spec of negative size"),
        pytest.param(lambda: Topology(tp=0), "tp=0", id="topology of nobody"),
        pytest.param(lambda: Topology(tp=4, ep=3), "ep", id="experts that do not divide"),
        pytest.param(
            lambda: PlacedPiece.of("t", checkpoint=row_major((4,)), runtime=row_major((2, 2))),
            "equal shapes",
            id="placement of unequal shapes",
        ),
    ],
)
def test_contradiction_is_refused(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(ManifestError, match=expected):
        make()


def test_negative_offset_is_refused() -> None:
    with pytest.raises(RegionError, match="negative"):
        one(tensors=(entry(offset=-1),))


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param({"format": 1}, id="another format"),
        pytest.param({"unknown": 1}, id="an unknown field"),
        pytest.param({"rank": True}, id="a boolean for a number"),
        pytest.param({"chunk_digests": "0"}, id="half a byte"),
        pytest.param({"storages": [16.0]}, id="a float for a size"),
        pytest.param({"topology": {"tp": 1, "dp": 2}}, id="an unknown axis"),
        pytest.param({"tensors": [{}]}, id="a tensor without members"),
        pytest.param({"checkpoint": [["t", "float32"]]}, id="a spec without a shape"),
    ],
)
def test_text_is_refused_with(edit: Json) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_text(json.dumps(json.loads(SIMPLE.text) | edit).encode())


@pytest.mark.parametrize("field", sorted(json.loads(SIMPLE.text)))
def test_text_is_refused_without(field: str) -> None:
    value = json.loads(SIMPLE.text)
    del value[field]
    with pytest.raises(ManifestError):
        Manifest.from_text(json.dumps(value).encode())


@pytest.mark.parametrize("field", sorted(set(json.loads(SIMPLE.text)["tensors"][1]) | {"unknown"}))
def test_tensor_is_refused_with_a_field_too_many_or_too_few(field: str) -> None:
    value = json.loads(SIMPLE.text)
    tensor = value["tensors"][0]
    if field in tensor:
        del tensor[field]
    elif field != "strides":
        tensor[field] = 1
    else:
        tensor[field] = [1]
    with pytest.raises(ManifestError):
        Manifest.from_text(json.dumps(value).encode())


# The flat space and its chunks


@given(SIZES, st.integers(1, 12))
def test_chunk_bounds_cover_the_flat_space_in_chunks_that_keep_their_promises(sizes: list[int], limit: int) -> None:
    bounds = chunk_bounds(sizes, chunk_bytes=limit)
    assert bounds[0] == 0
    assert bounds[-1] == sum(sizes)
    assert all(0 < end - begin <= limit for begin, end in pairwise(bounds))
    base = 0
    for size in sizes:
        inner = [bound for bound in bounds if base < bound < base + size]
        if size >= limit:
            assert {base, base + size} <= set(bounds)
            assert inner == list(range(base + limit, base + size, limit))
        else:
            assert inner == []
        base += size


@given(SIZES, st.integers(1, 12), SIZES)
def test_grid_of_a_large_storage_does_not_depend_on_its_neighbours(
    before: list[int], limit: int, after: list[int]
) -> None:
    size = 3 * limit + 1
    bounds = chunk_bounds([*before, size, *after], chunk_bytes=limit)
    base = sum(before)
    assert [bound - base for bound in bounds if base <= bound <= base + size] == [0, limit, 2 * limit, 3 * limit, size]


@given(SIZES.filter(any), st.integers(1, 12), st.data())
def test_chunks_between_cut_an_interval_and_number_what_is_whole(
    sizes: list[int], limit: int, data: st.DataObject
) -> None:
    manifest = Manifest(model="", revision="", storages=tuple(sizes), tensors=(), chunk_bytes=limit)
    begin = data.draw(st.integers(0, sum(sizes)))
    end = data.draw(st.integers(begin, sum(sizes)))
    pieces = list(manifest.chunks_between(begin, end))
    assert [i for low, high, _ in pieces for i in range(low, high)] == list(range(begin, end))
    chunks = list(pairwise(manifest.chunk_bounds))
    for low, high, number in pieces:
        assert number == (chunks.index((low, high)) if (low, high) in chunks else None)
        assert any(left <= low < high <= right for left, right in chunks)


@given(SIZES.filter(any))
def test_storage_at_is_the_one_that_owns_the_byte(sizes: list[int]) -> None:
    manifest = Manifest(model="", revision="", storages=tuple(sizes), tensors=())
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    assert [manifest.storage_at(address) for address in range(sum(sizes))] == owners
    assert manifest.total_bytes == len(owners)


@given(manifests())
def test_flat_region_has_the_bytes_of_the_tensor_inside_its_storage(manifest: Manifest) -> None:
    for tensor in manifest.tensors:
        flat = manifest.flat_region(tensor)
        base = manifest.storage_bases[tensor.storage]
        assert flat.numel == tensor.nbytes
        assert base <= flat.offset <= flat.end <= base + manifest.storages[tensor.storage]


def test_b08_empty_tensors_stay_in_the_manifest_each_with_its_dtype_and_shape() -> None:
    specs = [("g_idx", "int32", (0,)), ("pad", "float16", (2, 0)), ("w", "float32", (4,))]
    entries = [
        plain_entry(CheckpointSpec(name=name, dtype=dtype, shape=shape), storage=number)
        for number, (name, dtype, shape) in enumerate(specs)
    ]
    manifest = Manifest(model="", revision="", storages=(0, 0, 16), tensors=tuple(entries), chunk_bytes=8)
    again = Manifest.from_text(manifest.text, digest=manifest.digest)
    assert [(t.name, t.dtype, t.shape) for t in again.tensors] == specs
    assert again.chunk_bounds == (0, 8, 16)


# Layout fingerprints


def fingerprint(
    shape: tuple[int, ...] = (2, 3), strides: tuple[int, ...] = (3, 1), dtype: str = "int8", engine: str = "plain"
) -> str:
    return layout_fingerprint(engine=engine, dtype=dtype, shape=shape, strides=strides)


def test_fingerprint_tells_apart_what_is_laid_out_otherwise() -> None:
    seen = [
        fingerprint(),
        fingerprint(dtype="uint8"),
        fingerprint(shape=(3, 2), strides=(2, 1)),
        fingerprint(shape=(6,), strides=(1,)),
        fingerprint(strides=(1, 2)),
        fingerprint(strides=(4, 1)),
        fingerprint(engine="vllm 1"),
        layout_fingerprint(engine="plain", dtype="int8", shape=(2, 3), strides=(3, 1), facts={"kernel": "marlin"}),
    ]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    ("shape", "ours", "theirs"),
    [
        pytest.param((1, 3), (3, 1), (99, 1), id="contiguous"),
        pytest.param((1, 3), (3, 2), (99, 2), id="strided"),
        pytest.param((0, 3), (3, 1), (7, 5), id="without elements"),
    ],
)
def test_fingerprint_ignores_strides_that_no_element_sees(
    shape: tuple[int, ...], ours: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    assert fingerprint(shape, ours) == fingerprint(shape, theirs)


def test_fingerprint_does_not_depend_on_the_order_of_facts() -> None:
    facts = {"a": "1", "b": "2"}
    one_way = layout_fingerprint(engine="e", dtype="int8", shape=(), strides=(), facts=facts)
    assert one_way == layout_fingerprint(
        engine="e", dtype="int8", shape=(), strides=(), facts=dict(reversed(facts.items()))
    )


def test_checkpoint_tensor_of_sizes_without_end_is_refused_before_they_are_multiplied() -> None:
    for shape in ((10**18,) * 20_000, (2**62, 2, 2)):
        with pytest.raises(ManifestError, match=r"2\^63 elements or more"):
            CheckpointSpec(name="a", dtype="int8", shape=shape)
