"""Order of files: sorted, rotated per rank, never more or fewer of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.checkpoint.ordering import check_order, names_in_several, order_files, reading_notes
from weightwire.transfer.diagnostics import Stage
from weightwire.transfer.errors import SettingsError
from weightwire.transfer.ranks import GroupRank


def order(count: int, *, tp: int, k: int, rank: int) -> list[int]:
    """Indices of `count` sorted files in the order of one rank."""
    files = [f"{number:03}" for number in range(count)]
    return [int(file) for file in order_files(files, k, GroupRank(rank, tp), unique_names=True)]


# L26
def test_files_are_as_listed_or_sorted() -> None:
    listing = [Path("c"), Path("a"), Path("b")]
    assert order_files(listing, -1, unique_names=True) == (Path("c"), Path("a"), Path("b"))
    assert order_files(listing, 0, unique_names=True) == (Path("a"), Path("b"), Path("c"))
    assert order_files(listing, 2, GroupRank(0, 1), unique_names=True) == (Path("a"), Path("b"), Path("c"))


# L26
def test_mode_below_minus_one_is_refused() -> None:
    with pytest.raises(SettingsError, match="sort_files: is -2"):
        order_files(["a"], -2, unique_names=True)


# L27
@pytest.mark.parametrize(
    ("count", "tp", "k", "rank", "expected"),
    [
        (8, 4, 1, 1, [1, 2, 3, 0, 5, 6, 7, 4]),
        (8, 2, 2, 1, [2, 3, 0, 1, 6, 7, 4, 5]),
        (7, 4, 1, 3, [3, 0, 1, 2, 4, 5, 6]),
        (5, 1, 3, 0, [0, 1, 2, 3, 4]),
        (0, 2, 1, 1, []),
    ],
)
def test_files_are_rotated_within_their_group(count: int, tp: int, k: int, rank: int, expected: list[int]) -> None:
    assert order(count, tp=tp, k=k, rank=rank) == expected


# L28
def test_every_rank_reads_every_file_once() -> None:
    for count in range(1, 10):
        for tp in range(1, 5):
            for k in range(1, 4):
                for rank in range(tp):
                    assert sorted(order(count, tp=tp, k=k, rank=rank)) == list(range(count))


# L28
@given(files=st.lists(st.text(max_size=3), unique=True), tp=st.integers(1, 9), k=st.integers(-1, 5), data=st.data())
def test_order_is_a_permutation(files: list[str], tp: int, k: int, data: st.DataObject) -> None:
    group = GroupRank(data.draw(st.integers(0, tp - 1)), tp)
    assert sorted(order_files(files, k, group, unique_names=True)) == sorted(files)


# L29
def test_staggering_is_refused_where_ranks_would_keep_different_copies() -> None:
    names = {"0": {"a"}, "1": {"b"}, "2": {"c"}, "3": {"a"}}
    orders = [order(4, tp=2, k=2, rank=rank) for rank in (0, 1)]
    last_write = [next(file for file in reversed(each) if file in (0, 3)) for each in orders]
    assert orders == [[0, 1, 2, 3], [2, 3, 0, 1]]
    assert last_write == [3, 0]
    assert names_in_several(names) == {"a": ["0", "3"]}
    for rank in (0, 1):
        with pytest.raises(SettingsError, match="staggering over 2 ranks would decide which copy is loaded"):
            order_files(names, 2, GroupRank(rank, 2), unique_names=not names_in_several(names))


# L29
def test_unique_names_or_a_plain_order_are_not_refused() -> None:
    assert names_in_several({"0": {"a"}, "1": {"b"}}) == {}
    check_order(2, GroupRank(1, 2), unique_names=True)
    check_order(2, GroupRank(0, 1), unique_names=False)
    check_order(0, GroupRank(1, 2), unique_names=False)
    with pytest.raises(SettingsError, match="the listing's order would decide"):
        check_order(-1, unique_names=False)


# L30
def test_staggering_is_off_unless_asked_for_and_shares_starts_in_a_short_group() -> None:
    files = ["0", "1", "2"]
    assert {order_files(files, 0, GroupRank(rank, 4), unique_names=True) for rank in range(4)} == {("0", "1", "2")}
    assert [order(3, tp=4, k=1, rank=rank)[0] for rank in range(4)] == [0, 1, 2, 0]


# L30
@given(count=st.integers(1, 24), tp=st.integers(1, 6), k=st.integers(1, 4))
def test_ranks_are_at_no_more_than_as_many_files_as_they_are(count: int, tp: int, k: int) -> None:
    orders = [order(count, tp=tp, k=k, rank=rank) for rank in range(tp)]
    for step in range(count):
        assert len({files[step] for files in orders}) <= tp
    if count >= tp * k:
        assert [files[0] for files in orders] == [rank * k for rank in range(tp)]


# D10, L187
def test_prefetch_beside_reading_threads_is_noted() -> None:
    notes = reading_notes("rank 1", prefetch=True, multithreaded=True, mmap=True)
    assert [(note.code, note.stage, note.subject) for note in notes] == [("D10", Stage.ITERATION, "rank 1")]
    assert reading_notes("rank 1", prefetch=False, multithreaded=True, mmap=True) == ()
    assert reading_notes("rank 1", prefetch=True, multithreaded=False, mmap=True) == ()


# D10
def test_shared_storage_without_staggering_is_noted() -> None:
    def codes(sort_files: int, ranks: int) -> list[str]:
        group = GroupRank(0, ranks)
        notes = reading_notes(
            "m",
            prefetch=False,
            multithreaded=True,
            mmap=True,
            shared_storage=True,
            sort_files=sort_files,
            group=group,
        )
        return [note.code for note in notes]

    assert codes(0, 4) == ["D10"]
    assert codes(0, 1) == []
    assert codes(1, 4) == ["D11"]


# D11, L187
def test_reads_without_mmap_are_noted() -> None:
    notes = reading_notes("m", prefetch=True, multithreaded=True, mmap=False)
    assert [(note.code, note.stage) for note in notes] == [("D11", Stage.ORDERING_MMAP)]
