from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.errors import PlacementError, TopologyError
from weightwire.transfer.loading.vocabulary import VocabLoader, padded_vocab
from weightwire.transfer.ranks import GroupRank


def load(loader: VocabLoader, tensor: torch.Tensor) -> torch.Tensor:
    shell = torch.full((loader.rows, *tensor.shape[1:]), float("nan"))
    assert loader.load(shell, tensor, None, name="embed_tokens.weight") == (None,)
    return shell


# L118, C7
def test_rows_beyond_the_vocabulary_are_zero() -> None:
    tensor = torch.arange(10.0).view(5, 2)
    shells = [load(VocabLoader(vocab=5, padded=6, group=GroupRank(rank, 2)), tensor) for rank in range(2)]
    assert torch.equal(shells[0], tensor[:3])
    assert shells[1].tolist() == [[6, 7], [8, 9], [0, 0]]


# L118
def test_b22_padded_vocabulary_and_pushed_tables() -> None:
    rows = torch.arange(10.0).view(10, 1)
    pushed = torch.cat([rows, torch.full((2, 1), 77.0)])
    plain = VocabLoader(vocab=10, padded=12, group=GroupRank(1, 2))
    declared = VocabLoader(vocab=10, padded=12, group=GroupRank(1, 2), accept_padded=True)
    expected = [6, 7, 8, 9, 0, 0]
    assert load(plain, rows).flatten().tolist() == expected
    assert load(declared, rows).flatten().tolist() == expected
    assert load(declared, pushed).flatten().tolist() == expected
    for loader, tensor in ((plain, pushed), (plain, pushed[:11]), (declared, pushed[:11])):
        shell = torch.full((6, 1), 5.0)
        with pytest.raises(PlacementError, match=rf"weight \[{len(tensor)}, 1\].*is expected to be 10"):
            loader.load(shell, tensor, None, name="embed_tokens.weight")
        assert shell.flatten().tolist() == [5.0] * 6


# L118, C4, C7
@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 8))
def test_rows_of_all_ranks_are_the_vocabulary_once(vocab: int, ranks: int, multiple: int) -> None:
    padded = padded_vocab(vocab, multiple * ranks)
    assert vocab <= padded < vocab + multiple * ranks
    tensor = torch.arange(1.0, vocab + 1.0)
    shells = [
        load(VocabLoader(vocab=vocab, padded=padded, group=GroupRank(rank, ranks)), tensor) for rank in range(ranks)
    ]
    joined = torch.cat(shells)
    assert torch.equal(joined[:vocab], tensor)
    assert not joined[vocab:].any()


def test_padding_has_to_divide_and_to_hold_the_vocabulary() -> None:
    with pytest.raises(TopologyError, match="padded vocabulary: 7 over 2 ranks leaves 1"):
        VocabLoader(vocab=5, padded=7, group=GroupRank(0, 2))
    with pytest.raises(TopologyError, match="4 rows do not hold a vocabulary of 5"):
        VocabLoader(vocab=5, padded=4, group=GroupRank(0, 2))
    with pytest.raises(ValueError, match="multiple is 0"):
        padded_vocab(5, 0)


def test_padding_is_part_of_the_layout() -> None:
    facts = VocabLoader(vocab=5, padded=6, group=GroupRank(1, 2)).fingerprint_facts()
    assert facts == {"vocab": "1/2 of 5 padded to 6"}
