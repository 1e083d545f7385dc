"""The split of `kv_b_proj`: rows, shapes, strides, and what they multiply to."""

from __future__ import annotations

import pytest
import torch

from weightwire.transfer.errors import FinishError
from weightwire.transfer.finishing.latent_split import HeadRows, can_keep_blocks, split_blocks, split_heads

H, DN, DV, R = 2, 3, 2, 4
ROWS = HeadRows(key=DN, value=DV)


# L136, L137, L138, C5
def test_b29_rows_of_each_head_are_its_key_s_and_then_its_value_s() -> None:
    weight = torch.arange(40.0).view(10, 4)
    w_kc, w_vc = split_heads(weight, ROWS)
    assert torch.cat([w_kc[0], w_kc[1]]).equal(weight[[0, 1, 2, 5, 6, 7]])
    assert torch.cat([w_vc[0].T, w_vc[1].T]).equal(weight[[3, 4, 8, 9]])


# L137, L138, L151, C5
@pytest.mark.parametrize(
    ("heads", "rows", "rank", "kc", "vc"),
    [
        pytest.param(H, ROWS, R, ((2, 3, 4), (12, 1, 3)), ((2, 4, 2), (8, 1, 4)), id="a small one"),
        pytest.param(
            128, HeadRows(key=128, value=128), 512, ((128, 128, 512), (65536, 1, 128)),
            ((128, 512, 128), (65536, 1, 512)), id="DeepSeek-V3",
        ),
    ],
)  # fmt: skip
def test_shapes_and_strides_are_those_that_kernels_take(
    heads: int, rows: HeadRows, rank: int, kc: tuple[object, object], vc: tuple[object, object]
) -> None:
    weight = torch.empty(heads * rows.total, rank, device="meta", dtype=torch.bfloat16)
    w_kc, w_vc = split_heads(weight, rows)
    assert (tuple(w_kc.shape), w_kc.stride()) == kc
    assert (tuple(w_vc.shape), w_vc.stride()) == vc
    assert not w_vc.is_contiguous()
    assert w_kc.nbytes + w_vc.nbytes == weight.nbytes


# L139
def test_products_in_the_latent_space_are_those_of_keys_and_values() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, latent, queries, weights = draw(H * ROWS.total, R), draw(5, R), draw(H, 5, DN), draw(H, 5, 5)
    w_kc, w_vc = split_heads(weight, ROWS)
    for head in range(H):
        rows = weight[head * ROWS.total : (head + 1) * ROWS.total]
        keys, values = latent @ rows[:DN].T, latent @ rows[DN:].T
        assert torch.allclose(queries[head] @ keys.T, queries[head] @ w_kc[head] @ latent.T, rtol=0, atol=1e-12)
        assert torch.allclose(weights[head] @ values, weights[head] @ latent @ w_vc[head], rtol=0, atol=1e-12)


# L140
def test_split_of_a_rank_s_rows_is_that_rank_s_part_of_the_split() -> None:
    weight = torch.randn(4 * ROWS.total, R)
    whole = split_heads(weight, ROWS)
    for rank, local in enumerate(weight.chunk(2)):
        for part, of_whole in zip(split_heads(local, ROWS), whole, strict=True):
            assert part.equal(of_whole[2 * rank : 2 * rank + 2])


# L148
@pytest.mark.parametrize("heads", [1, 2])
def test_results_share_no_memory_with_the_parameter(heads: int) -> None:
    weight = torch.randn(heads * ROWS.total, R)
    for part in split_heads(weight, ROWS):
        assert part.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()


# L142
def test_blocks_are_split_like_their_values() -> None:
    rows, rank, block, heads = HeadRows(key=4, value=2), 4, (2, 2), 3
    weight = torch.randn(heads * 6, rank).to(torch.float8_e4m3fn)
    scales = torch.arange(18.0).view(9, 2)
    found = split_blocks(weight, scales, rows, block)
    shapes = [tuple(part.shape) for part in (found.w_kc, found.w_vc, found.w_scale_k, found.w_scale_v)]
    assert shapes == [(3, 4, 4), (3, 2, 4), (3, 2, 2), (3, 1, 2)]
    assert all(part.is_contiguous() for part in (found.w_kc, found.w_vc, found.w_scale_k, found.w_scale_v))
    wide = weight.float() * scales.repeat_interleave(2, 0).repeat_interleave(2, 1)
    for head in range(heads):
        keys, values = wide[6 * head : 6 * head + 4], wide[6 * head + 4 : 6 * head + 6]
        scale_k = found.w_scale_k[head].repeat_interleave(2, 0).repeat_interleave(2, 1)
        scale_v = found.w_scale_v[head].repeat_interleave(2, 0).repeat_interleave(2, 1)
        assert (found.w_kc[head].float() * scale_k).T.equal(keys)
        assert (found.w_vc[head].float() * scale_v).equal(values)


# L142
def test_blocks_of_deepseek_v3_have_one_tile_of_a_key_and_one_of_a_value() -> None:
    rows, block = HeadRows(key=128, value=128), (128, 128)
    weight = torch.empty(128 * 256, 512, device="meta", dtype=torch.float8_e4m3fn)
    found = split_blocks(weight, torch.empty(256, 4, device="meta"), rows, block)
    assert (tuple(found.w_scale_k.shape), tuple(found.w_scale_v.shape)) == ((128, 4, 1), (128, 1, 4))


# L142
def test_block_across_a_key_and_a_value_is_refused() -> None:
    rows = HeadRows(key=192, value=256)
    assert not can_keep_blocks(rows, 512, (128, 128))
    weight = torch.empty(2 * rows.total, 512, device="meta", dtype=torch.float8_e4m3fn)
    with pytest.raises(FinishError, match="192 and 256 rows"):
        split_blocks(weight, torch.empty(7, 4, device="meta"), rows, (128, 128))


@pytest.mark.parametrize("shape", [(11, 4), (10,)])
def test_rows_that_make_no_whole_heads_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(FinishError, match="whole heads"):
        split_heads(torch.zeros(shape), ROWS)
