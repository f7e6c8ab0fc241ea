"""Fragment order: a permutation of the bytes of each tile; a lane's words are what mma.m16n8k16 asks of it."""

from dataclasses import replace

import pytest
import torch
from tests.assertions import assert_bitwise

from tracefp4.errors import FormatError
from tracefp4.formats.fragments import (
    MAGNITUDE_BITS,
    byte_places,
    from_fragments,
    has_fragments,
    to_fragments,
)
from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_KV, NVFP4_ROW_POW2
from tracefp4.formats.tensor import BlockTensor


def random_pages(heads=2, frames=3, page_size=32, head_dim=128):
    size = (heads, frames, page_size)
    return BlockTensor(
        packed=torch.randint(0, 256, (*size, head_dim // 2), dtype=torch.uint8),
        block_scales=torch.randint(0, 127, (*size, head_dim // 16), dtype=torch.uint8),
        outer=torch.tensor(-3, dtype=torch.int8),
        scheme=NVFP4_KV,
    )


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("kind", ["k", "v"])
def test_there_and_back_changes_no_byte(kind, head_dim):
    pages = random_pages(head_dim=head_dim)
    moved = to_fragments(pages, kind)
    assert moved.packed.shape == pages.packed.shape and not torch.equal(moved.packed, pages.packed)
    back = from_fragments(moved)
    assert_bitwise(back.packed, pages.packed)
    assert_bitwise(back.block_scales, pages.block_scales)
    assert (int(moved.outer), moved.scheme) == (-3, NVFP4_KV)
    for places, per_token in zip(byte_places(kind, head_dim, torch.device("cpu")), (2, 16), strict=True):
        assert places.flatten().sort().values.tolist() == list(range(16 * head_dim // per_token))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_word_is_the_fragment_of_its_lane(head_dim):
    # Codes of a half word, by the bits that hold sign and magnitude from the highest on.
    bits_of_code = ((6, 2, 1, 0), (7, 5, 4, 3), (14, 10, 9, 8), (15, 13, 12, 11))
    # Fragments as in the PTX manual, element by element: a0 rows g, a1 rows g + 8, a2 and a3 the same 8 columns later.
    pages = random_pages(heads=1, frames=1, page_size=16, head_dim=head_dim)
    codes, scales = pages.codes()[0, 0], pages.block_scales[0, 0]
    for kind in ("k", "v"):
        moved = to_fragments(pages, kind)
        words = moved.packed.flatten().view(torch.int32).view(-1, 32, 4)
        scale_bytes = moved.block_scales.flatten()
        for block in range(head_dim // 16):
            tile = codes[:, 16 * block : 16 * block + 16]
            a = tile if kind == "k" else tile.T
            for lane in range(32):
                g, j = divmod(lane, 4)
                word = int(words[block // 4, lane, block % 4]) & 0xFFFFFFFF
                nibbles = [  # the upper half holds the odd columns
                    int("".join(str(word >> 16 * upper + bit & 1) for bit in bits), 2)
                    for upper in (0, 1)
                    for bits in bits_of_code
                ]
                order = (0, 2, 1, 3) if kind == "k" else (0, 1, 2, 3)
                for n, fragment in enumerate(order):
                    row, column = g + 8 * (fragment % 2), 2 * j + 8 * (fragment // 2)
                    assert nibbles[n] == a[row, column] and nibbles[n + 4] == a[row, column + 1]
                if kind == "k":
                    at = (g * (head_dim // 16) + block) * 2
                    expected = [scales[g, block], scales[g + 8, block]]
                else:
                    at = (j * (head_dim // 16) + block) * 4
                    expected = [scales[t, block] for t in (2 * j, 2 * j + 1, 2 * j + 8, 2 * j + 9)]
                assert scale_bytes[at : at + len(expected)].tolist() == expected


def test_sizes_without_a_fragment_order_are_refused():
    assert has_fragments(NVFP4_KV, head_dim=64, page_size=16)
    for scheme, head_dim, page_size in (
        (NVFP4_KV, 96, 16),
        (NVFP4_KV, 64, 8),
        (MXFP4_FLOOR, 64, 16),
        (NVFP4_ROW_POW2, 64, 16),
    ):
        assert not has_fragments(scheme, head_dim=head_dim, page_size=page_size)
    with pytest.raises(FormatError, match="head dim 96, 16 tokens a page"):
        to_fragments(random_pages(page_size=16, head_dim=96), "k")
    moved = to_fragments(random_pages(), "k")
    with pytest.raises(FormatError, match="kinds|Kinds"):
        type(moved)(
            packed=moved.packed,
            block_scales=moved.block_scales[..., :4],
            outer=moved.outer,
            scheme=NVFP4_KV,
            kind="k",
        )


def test_without_the_bits_of_signs_pages_hold_magnitudes():
    pages = to_fragments(random_pages(), "v")
    plain = from_fragments(replace(pages, packed=pages.packed & MAGNITUDE_BITS))
    assert torch.equal(plain.codes(), from_fragments(pages).codes() & 7)
