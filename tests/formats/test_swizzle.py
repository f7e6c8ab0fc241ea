"""Swizzled block scales: the published offset formula, padding, round trips, determinism, refusals."""

import itertools

import pytest
import torch
from tests.assertions import assert_bitwise

from tracefp4.errors import FormatError
from tracefp4.formats.schemes import NVFP4_ROW_POW2, NVFP4_TENSOR_POW2
from tracefp4.formats.swizzle import swizzle_block_scales, swizzled_size, unswizzle_block_scales
from tracefp4.ops.quantize import quantize

SHAPES = [(1, 1), (5, 4), (128, 4), (129, 5), (300, 12), (32, 8), (0, 4)]


def offset(row: int, block: int, blocks: int) -> int:
    """As the documentation writes it: tiles row by row, then (outer % 32) * 16 + (outer / 32) * 4 + inner."""
    tile = row // 128 * -(-blocks // 4) + block // 4
    outer, inner = row % 128, block % 4
    return tile * 512 + outer % 32 * 16 + outer // 32 * 4 + inner


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_every_byte_lies_at_its_published_offset_and_the_rest_is_zero(rows, blocks):
    plain = torch.randint(1, 256, (rows, blocks), dtype=torch.uint8)
    expected = torch.zeros(swizzled_size(rows, blocks), dtype=torch.uint8)
    for row, block in itertools.product(range(rows), range(blocks)):
        expected[offset(row, block, blocks)] = plain[row, block]
    assert_bitwise(swizzle_block_scales(plain), expected)


def test_golden_offsets():
    plain = torch.zeros(256, 8, dtype=torch.uint8)
    plain[0, 1], plain[1, 0], plain[32, 0], plain[0, 4], plain[128, 0] = 1, 2, 3, 4, 5
    swizzled = swizzle_block_scales(plain)
    assert [int((swizzled == value).nonzero()) for value in range(1, 6)] == [1, 16, 4, 512, 1024]


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_round_trip_with_leading_dimensions(rows, blocks):
    plain = torch.randint(0, 256, (3, rows, blocks), dtype=torch.uint8)
    swizzled = swizzle_block_scales(plain)
    assert swizzled.shape == (3, swizzled_size(rows, blocks))
    assert_bitwise(unswizzle_block_scales(swizzled, rows=rows, blocks=blocks), plain)
    assert_bitwise(swizzle_block_scales(plain[1]), swizzled[1])
    assert_bitwise(swizzle_block_scales(plain.transpose(0, 2).contiguous().transpose(0, 2)), swizzled)


def test_lay_3_padding_is_zero_whatever_the_memory_held():
    x = torch.randn(5, 64)
    block_scales = quantize(x, scheme=NVFP4_ROW_POW2).block_scales
    poison = torch.full((1 << 16,), 0xFF, dtype=torch.uint8)
    del poison
    first, second = swizzle_block_scales(block_scales), swizzle_block_scales(block_scales)
    assert_bitwise(first, second)
    padding = unswizzle_block_scales(first, rows=128, blocks=4)[5:]
    assert padding.shape == (123, 4) and padding.count_nonzero() == 0
    poisoned = first.clone()
    for row, block in itertools.product(range(5, 128), range(4)):
        poisoned[offset(row, block, 4)] = 0x7F
    assert_bitwise(unswizzle_block_scales(poisoned, rows=5, blocks=4), block_scales)


def test_lay_6_stored_scales_are_a_plain_matrix_and_swizzled_ones_are_not():
    w = torch.randn(128, 64)
    t = quantize(w, scheme=NVFP4_TENSOR_POW2)
    assert t.block_scales.shape == (128, 4)
    swizzled = swizzle_block_scales(t.block_scales)
    assert swizzled.shape == (512,) and not torch.equal(swizzled.view(128, 4), t.block_scales)
    assert_bitwise(unswizzle_block_scales(swizzled, rows=128, blocks=4), t.block_scales)
    with pytest.raises(FormatError, match=r"are uint8 \[..., 512\]; got torch.uint8 \(128, 4\)"):
        unswizzle_block_scales(t.block_scales, rows=128, blocks=4)


@pytest.mark.peers
def test_torchao_writes_the_same_bytes():
    blocked = pytest.importorskip(
        "torchao.prototype.mx_formats.utils", reason="torchao is not installed: `make peers`"
    )
    for rows, blocks in SHAPES[:-1]:
        plain = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)
        assert_bitwise(swizzle_block_scales(plain), blocked.to_blocked(plain))


@pytest.mark.parametrize("bad", [torch.zeros(4, dtype=torch.uint8), torch.zeros(4, 4)], ids=["1-D", "float"])
def test_what_is_no_matrix_of_bytes_is_refused(bad):
    with pytest.raises(FormatError, match="needs uint8"):
        swizzle_block_scales(bad)
