from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from weightwire.transfer.errors import ConfigError, PlacementError, TopologyError
from weightwire.transfer.loading.fused_loaders import QKV, MergedLoader, QkvGeometry, QkvLoader, QkvPart
from weightwire.transfer.loading.slots import SlotId
from weightwire.transfer.ranks import GroupRank

NAN = float("nan")


def geometry(heads: int, kv_heads: int, dim: int, group: tuple[int, int], *, pad: bool = False) -> QkvGeometry:
    return QkvGeometry(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        group=GroupRank(*group),
        pad_heads=pad,
    )


def rows(count: int, *, first: int = 0) -> torch.Tensor:
    """A column vector of row numbers."""
    return torch.arange(float(first), float(first + count)).view(count, 1)


def filled(loader: QkvLoader | MergedLoader, count: int, pieces: dict[SlotId, torch.Tensor]) -> torch.Tensor:
    """A poisoned shell of `count` rows with all pieces loaded."""
    shell = torch.full((count, *next(iter(pieces.values())).shape[1:]), NAN)
    for slot, piece in pieces.items():
        assert loader.load(shell, piece, slot, name="qkv_proj.weight") == (loader.slots if slot is None else (slot,))
    return shell


def one_value(tensor: torch.Tensor) -> float:
    """The value that all elements have."""
    (value,) = set(tensor.flatten().tolist())
    return float(value)


def span(begin: int, end: int) -> list[float]:
    return [float(row) for row in range(begin, end)]


# L100, L58
@pytest.mark.parametrize("order", ["qkv", "vqk"])
def test_qkv_slot_says_where_and_rank_says_which(order: str) -> None:
    loader = QkvLoader(geometry=geometry(8, 4, 4, (1, 2)))
    tensors = {"q": rows(32), "k": rows(16, first=100), "v": rows(16, first=200)}
    shell = filled(loader, 32, {part: tensors[part] for part in order}).flatten().tolist()
    assert shell == span(16, 32) + span(108, 116) + span(208, 216)


# L101
def test_replicated_kv_head_belongs_to_neighbouring_ranks() -> None:
    loader = QkvLoader(geometry=geometry(8, 2, 4, (2, 4)))
    assert loader.geometry.total_rows == 16
    shell = filled(loader, 16, {"q": rows(32), "k": rows(8, first=100), "v": rows(8, first=200)}).flatten().tolist()
    assert shell == span(16, 24) + span(104, 108) + span(204, 208)


# L101
@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"),
    [
        pytest.param(8, 3, 4, id="3 kv heads on 4 ranks"),
        pytest.param(9, 3, 2, id="3 kv heads on 2 ranks"),
        pytest.param(28, 4, 8, id="28 heads on 8 ranks"),
    ],
)
def test_heads_that_do_not_divide_are_refused_when_building(heads: int, kv_heads: int, ranks: int) -> None:
    with pytest.raises(TopologyError, match=rf"\b({heads}|{kv_heads})\b.*\b{ranks}\b.*--pad-heads"):
        geometry(heads, kv_heads, 4, (0, ranks))


def test_query_heads_are_a_multiple_of_kv_heads() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads 8: no multiple of num_key_value_heads 3"):
        geometry(8, 3, 4, (0, 1))


# L101
def test_b19_fewer_kv_heads_than_ranks() -> None:
    labels = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    norm = torch.tensor([0.0, 0.0, 1.0, 1.0])
    for ranks, expected in ((4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1])):
        held, norms = [], []
        for rank in range(ranks):
            loader = QkvLoader(geometry=geometry(8, 2, 2, (rank, ranks)))
            shell = torch.full((loader.geometry.total_rows, 1), NAN)
            loader.load(shell, labels, "k", name="qkv")
            begin = loader.geometry.rows["q"]
            held.append(one_value(shell[begin : begin + 2]))
            k_norm = torch.full((2,), NAN)
            loader.geometry.head_loader("k").load(k_norm, norm, None, name="k_norm")
            norms.append(one_value(k_norm))
        assert (held, norms) == (expected, expected)
    with pytest.raises(TopologyError, match="attention over 3 ranks: 2 key-value heads"):
        geometry(8, 2, 2, (0, 3))


# L102
def test_gate_and_up_are_halves_gate_first() -> None:
    loader = MergedLoader(sizes=(8, 8), group=GroupRank(1, 2))
    gate, up = rows(8), rows(8, first=100)
    assert filled(loader, 8, {0: gate, 1: up}).flatten().tolist() == span(4, 8) + span(104, 108)


# L58
def test_order_of_arrival_does_not_matter() -> None:
    loader = MergedLoader(sizes=(8, 8), group=GroupRank(1, 2))
    gate, up = rows(8), rows(8, first=100)
    assert torch.equal(filled(loader, 8, {1: up, 0: gate}), filled(loader, 8, {0: gate, 1: up}))


# L102
def test_biases_are_cut_like_weights() -> None:
    merged = MergedLoader(sizes=(8, 8), group=GroupRank(1, 2))
    bias = filled(merged, 8, {0: rows(8).flatten(), 1: rows(8, first=100).flatten()})
    assert bias.tolist() == span(4, 8) + span(104, 108)
    qkv = QkvLoader(geometry=geometry(8, 2, 1, (1, 2)))
    assert filled(qkv, 6, {None: torch.arange(12.0)}).tolist() == [*span(4, 8), 9, 11]


# L103
def test_fused_qkv_is_split_by_global_part_sizes_first() -> None:
    loader = QkvLoader(geometry=geometry(8, 4, 1, (1, 2)))
    assert filled(loader, 8, {None: rows(16)}).flatten().tolist() == [*span(4, 8), 10, 11, 14, 15]


# L103
def test_fused_gate_up_is_split_by_global_part_sizes_first() -> None:
    loader = MergedLoader(sizes=(8, 4), group=GroupRank(1, 2))
    assert filled(loader, 6, {None: rows(12)}).flatten().tolist() == [*span(4, 8), 10, 11]


# L103, L100
def test_b20_prefused_tensors_are_not_cut_in_one() -> None:
    tensor = rows(12)
    shells = [
        filled(QkvLoader(geometry=geometry(8, 2, 1, (rank, 2))), 6, {None: tensor}).flatten().tolist()
        for rank in range(2)
    ]
    assert shells == [[0, 1, 2, 3, 8, 10], [4, 5, 6, 7, 9, 11]]


# L113
def test_presharded_parts_only_go_to_their_place() -> None:
    loader = QkvLoader(geometry=geometry(8, 4, 1, (1, 2)), presharded=True)
    assert filled(loader, 8, {"v": rows(2), "q": rows(4), "k": rows(2)}).flatten().tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    merged = MergedLoader(sizes=(4, 4), group=GroupRank(1, 2), presharded=True)
    assert filled(merged, 4, {None: rows(4)}).flatten().tolist() == span(0, 4)


@pytest.mark.parametrize(
    ("slot", "count", "message"),
    [
        pytest.param("q", 16, r"into parameter \[16, 1\]: axis 0 of the weight is expected to be 32", id="half a part"),
        pytest.param(None, 32, "axis 0 of the weight is expected to be 64", id="a part without its slot"),
        pytest.param(0, 32, "slot 0 is not one of its slots", id="a slot of gate and up"),
        pytest.param("", 32, "slot  is not one of its slots", id="no slot at all"),
    ],
)
def test_qkv_refuses_before_it_writes(slot: SlotId, count: int, message: str) -> None:
    loader = QkvLoader(geometry=geometry(8, 4, 4, (3, 4)))
    shell = torch.zeros(16, 1)
    with pytest.raises(PlacementError, match=message):
        loader.load(shell, torch.ones(count, 1), slot, name="qkv")
    assert not shell.any()


def test_x5_fused_siblings_of_different_precision() -> None:
    """Each layer decides for itself: the parts of a shell that do not have its dtype are refused."""
    loader = QkvLoader(geometry=geometry(2, 2, 1, (0, 1)))
    fp8 = torch.ones(2, 1).to(torch.float8_e4m3fn)
    layers = [torch.zeros(6, 1, dtype=torch.float8_e4m3fn) for _ in range(2)]
    for part in QKV:
        loader.load(layers[0], fp8, part, name="layers.0.qkv")
    with pytest.raises(PlacementError, match=r"'layers\.1\.qkv': dtype is bfloat16, expected float8_e4m3fn"):
        loader.load(layers[1], fp8.bfloat16(), "q", name="layers.1.qkv")
    assert layers[0].float().flatten().tolist() == [1] * 6
    assert not layers[1].float().any()


# L117, C7
def test_surplus_heads_are_zero_in_every_part_and_in_o_proj() -> None:
    for rank in range(6):
        heads = geometry(64, 64, 2, (rank, 6), pad=True)
        assert (heads.local_heads, heads.local_kv_heads, heads.num_padded_heads) == (11, 11, 66)
        real = 2 * (11 if rank < 5 else 9)
        expected = (rows(128, first=1)[22 * rank : 22 * rank + real].flatten().tolist() + [0.0] * 22)[:22]
        shell = filled(QkvLoader(geometry=heads), 66, {part: rows(128, first=1) for part in QKV})
        assert shell.flatten().tolist() == expected * 3
        o_proj = torch.full((1, 22), NAN)
        heads.o_proj_loader().load(o_proj, rows(128, first=1).T, None, name="o_proj")
        assert o_proj.flatten().tolist() == expected
        assert (expected[18:22] == [0, 0, 0, 0]) is (rank == 5)


# L117
@pytest.mark.parametrize(
    ("heads", "local", "last"),
    [pytest.param(96, 16, 16, id="divides"), pytest.param(100, 17, 15, id="two surplus heads")],
)
def test_padded_head_counts(heads: int, local: int, last: int) -> None:
    found = geometry(heads, heads, 1, (5, 6), pad=True)
    assert (found.local_heads, found.cut("q").length) == (local, last)


# L117
def test_b22_uneven_heads_are_refused_or_padded_on_request() -> None:
    with pytest.raises(TopologyError, match="attention over 8 ranks: 28 heads, expected a multiple of 8, or padding"):
        geometry(28, 4, 1, (0, 8))
    held = [
        filled(QkvLoader(geometry=geometry(28, 4, 1, (rank, 8), pad=True)), 6, {"q": rows(28, first=1)})[:4]
        for rank in range(8)
    ]
    # Seven query heads for each key-value head, which two ranks share: the second of them has the surplus one.
    assert held[0].flatten().tolist() == [1, 2, 3, 4]
    assert held[1].flatten().tolist() == [5, 6, 7, 0]
    assert held[2].flatten().tolist() == [8, 9, 10, 11]
    o_proj = torch.full((1, 4), NAN)
    geometry(28, 4, 1, (1, 8), pad=True).o_proj_loader().load(o_proj, rows(28, first=1).T, None, name="o_proj")
    assert o_proj.flatten().tolist() == [5, 6, 7, 0]


# L117
def test_head_padding_is_part_of_the_layout() -> None:
    plain, padded = geometry(64, 64, 2, (0, 8)), geometry(64, 64, 2, (0, 6), pad=True)
    assert plain.fingerprint_facts()["heads"] == "8 x 8 for 64"
    assert padded.fingerprint_facts()["heads"] == "11 x 6 for 64"


# L101, L100
def test_head_dims_of_keys_and_values_may_differ() -> None:
    found = QkvGeometry(num_heads=4, num_kv_heads=2, head_dim=3, v_head_dim=2, group=GroupRank(1, 2))
    assert dict(found.rows) == {"q": 6, "k": 3, "v": 2}
    shell = filled(QkvLoader(geometry=found), 11, {None: rows(12 + 6 + 4)}).flatten().tolist()
    assert shell == span(6, 12) + span(15, 18) + span(20, 22)


def every_rank(heads: int, kv_heads: int, ranks: int, *, pad: bool) -> Iterator[QkvGeometry]:
    for rank in range(ranks):
        yield geometry(heads, kv_heads, 1, (rank, ranks), pad=pad)


def held_heads(found: QkvGeometry, part: QkvPart) -> list[int | None]:
    """Number of the global head in each local place, None for surplus ones; by brute force over labelled rows."""
    total = {"q": found.num_heads, "k": found.num_kv_heads, "v": found.num_kv_heads}
    shell = filled(QkvLoader(geometry=found), found.total_rows, {name: rows(total[name], first=1) for name in QKV})
    sizes = list(found.rows.values())
    labels = shell.split_with_sizes(sizes)[QKV.index(part)].flatten().tolist()
    return [int(label) - 1 if label else None for label in labels]


# L100, L101, C4
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_heads_of_all_ranks_are_the_model_once_and_kv_heads_by_their_replicas(ranks: int) -> None:
    heads, kv_heads = 12, 12 if ranks == 3 else 2
    geometries = list(every_rank(heads, kv_heads, ranks, pad=False))
    queries = [head for found in geometries for head in held_heads(found, "q")]
    assert queries == list(range(heads))
    for part in ("k", "v"):
        keys = [head for found in geometries for head in held_heads(found, part)]
        assert keys == [head for head in range(kv_heads) for _ in range(geometries[0].kv_replicas)]


# L101, L117
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_every_query_head_lies_beside_its_kv_head(kv_heads: int, per_kv: int, ranks: int, pad: bool) -> None:
    heads = kv_heads * per_kv
    divides = heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    assume(pad or divides)
    seen = []
    for found in every_rank(heads, kv_heads, ranks, pad=pad):
        queries, keys = held_heads(found, "q"), held_heads(found, "k")
        assert keys == held_heads(found, "v")
        # A kernel numbers local heads: so many neighbouring queries to each key.
        per_local_kv = len(queries) // len(keys)
        assert per_local_kv * len(keys) == len(queries)
        for place, head in enumerate(queries):
            assert head is None or keys[place // per_local_kv] == head // per_kv
        seen += [head for head in queries if head is not None]
    assert sorted(seen) == list(range(heads))


# L103
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_fused_and_separate_checkpoints_fill_the_same(kv_heads: int, per_kv: int, ranks: int) -> None:
    for found in every_rank(kv_heads * per_kv, kv_heads, ranks, pad=True):
        loader, total = QkvLoader(geometry=found), kv_heads * (per_kv + 2)
        q, k, v = rows(total).split_with_sizes([kv_heads * per_kv, kv_heads, kv_heads])
        separate = filled(loader, found.total_rows, {"q": q, "k": k, "v": v})
        assert torch.equal(filled(loader, found.total_rows, {None: rows(total)}), separate)


# C4, L102
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 5), st.booleans())
def test_merged_parts_of_all_ranks_are_the_tensor_once(each: list[int], ranks: int, fused: bool) -> None:
    sizes = tuple(size * ranks for size in each)
    tensor = rows(sum(sizes))
    parts = tensor.split_with_sizes(list(sizes))
    pieces: dict[SlotId, torch.Tensor] = {None: tensor} if fused else dict(enumerate(parts))
    shells = [
        filled(MergedLoader(sizes=sizes, group=GroupRank(rank, ranks)), sum(each), pieces) for rank in range(ranks)
    ]
    for part, pieces_of_part in zip(
        parts, zip(*(shell.split_with_sizes(each) for shell in shells), strict=True), strict=True
    ):
        assert torch.equal(torch.cat(pieces_of_part), part)


def test_merged_parts_have_to_divide() -> None:
    with pytest.raises(TopologyError, match=r"parts \[8, 6\]: 6 over 4 ranks leaves 2"):
        MergedLoader(sizes=(8, 6), group=GroupRank(0, 4))
    with pytest.raises(TopologyError, match=r"real sizes \[5, 4\] do not lie inside"):
        MergedLoader(sizes=(4, 4), group=GroupRank(0, 4), real_sizes=(5, 4))
