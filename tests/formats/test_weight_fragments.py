"""Fragment order moves bytes and changes none."""

from dataclasses import replace

import pytest
import torch

from tracefp4.errors import FormatError
from tracefp4.formats.schemes import (
    MXFP4_FLOOR,
    NVFP4_KV,
    NVFP4_ROW_POW2,
    NVFP4_TENSOR_FP32,
    NVFP4_TENSOR_POW2,
)
from tracefp4.formats.tensor import BlockTensor
from tracefp4.formats.weight_fragments import WeightFragments, empty_fragments, from_fragments, to_fragments


def random_bytes(shape, scheme):
    """A BlockTensor of arbitrary bytes."""
    experts, rows, width = shape
    outer = {
        "tensor": torch.randint(-110, 117, (experts,)),
        "static": torch.tensor(-7),
        "none": torch.tensor(0),
    }
    return BlockTensor(
        packed=torch.randint(0, 256, (experts, rows, width // 2), dtype=torch.uint8),
        block_scales=torch.randint(0, 256, (experts, rows, width // scheme.block_size), dtype=torch.uint8),
        outer=outer[scheme.outer].to(torch.int8),
        scheme=scheme,
    )


@pytest.mark.parametrize("scheme", [NVFP4_TENSOR_POW2, NVFP4_KV, MXFP4_FLOOR], ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(1, 16, 64), (3, 48, 96), (2, 16, 320)], ids=str)
def test_the_way_there_and_back_is_the_identity(scheme, shape):
    given = random_bytes(shape, scheme)
    fragments = to_fragments(given)
    back = from_fragments(fragments)
    for part in ("packed", "block_scales", "outer"):
        assert torch.equal(getattr(back, part), getattr(given, part))
    assert fragments.shape == shape and back.scheme == scheme
    one = from_fragments(fragments.of_expert(shape[0] - 1))
    assert torch.equal(one.packed[0], given.packed[-1])


def test_every_nibble_lies_where_the_layout_says():
    given = random_bytes((2, 32, 128), NVFP4_TENSOR_POW2)
    codes, fragments = given.codes(), to_fragments(given)
    words = fragments.words.view(torch.int32).view(2, 2, 2, 8, 4, 4).to(torch.int64)
    for g in range(8):
        for j in range(4):
            for t in range(4):
                for p in range(4):
                    for o in range(2):
                        row, column = g + 8 * (p % 2), 16 * j + 4 * t + 2 * (p // 2) + o
                        found = words[:, :, :, g, j, t] >> (4 * p + 16 * o) & 15
                        assert torch.equal(found, codes[:, row::16, column::64].to(torch.int64))
    for row in range(16):
        for block in range(4):
            found = fragments.scales[:, :, :, row % 8, block, row // 8]
            assert torch.equal(found, given.block_scales[:, row::16, block::4])


def test_two_lanes_share_an_mxfp4_block():
    given = random_bytes((1, 16, 64), MXFP4_FLOOR)
    scales = to_fragments(given).scales
    assert scales.shape == (1, 1, 1, 8, 2, 2)
    assert scales[0, 0, 0, 3, 1].tolist() == given.block_scales[0, [3, 11], 1].tolist()


def test_the_filling_reads_zero():
    fragments = to_fragments(random_bytes((1, 16, 80), NVFP4_TENSOR_POW2))
    lanes = fragments.words.view(2, 8, 4, 16)
    assert not lanes[1, :, 1:].any() and not fragments.scales[0, 0, 1, :, 1:].any()
    assert lanes[1, :, 0].any() and fragments.num_bytes == 1024 + 128 + 1


def test_what_fragments_cannot_hold_is_refused():
    for scheme, outer in (
        (NVFP4_ROW_POW2, torch.zeros(1, 16, dtype=torch.int8)),
        (NVFP4_TENSOR_FP32, torch.ones(1)),
    ):
        t = BlockTensor(
            packed=torch.zeros(1, 16, 32, dtype=torch.uint8),
            block_scales=torch.zeros(1, 16, 4, dtype=torch.uint8),
            outer=outer,
            scheme=scheme,
        )
        with pytest.raises(FormatError, match=f"{scheme.name}. Allowed are NVFP4 schemes with order POW2"):
            to_fragments(t)
    cpu = torch.device("cpu")
    for shape in ((0, 16, 64), (1, 8, 64), (1, 16, 40), (16, 64)):
        with pytest.raises(FormatError, match=r"need matrices \[E, N, K\]"):
            empty_fragments(shape, NVFP4_TENSOR_POW2, cpu)
    good = empty_fragments((2, 16, 64), NVFP4_TENSOR_POW2, cpu)
    one_off = torch.empty(good.words.numel() + 1, dtype=torch.uint8)[1:].view(good.words.shape)
    with pytest.raises(FormatError, match="need words as contiguous .* at a multiple of 16 bytes"):
        replace(good, words=one_off)
    with pytest.raises(FormatError, match="need exponents as contiguous"):
        WeightFragments(
            words=good.words,
            scales=good.scales,
            exponents=good.exponents[:1],
            scheme=good.scheme,
            width=64,
        )
