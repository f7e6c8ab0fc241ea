"""kv_append: bytes go where the layout says, block by block inside one token and head, and stay there."""

import pytest
import torch
from tests.assertions import assert_bitwise

from tracefp4.errors import FormatError
from tracefp4.formats.grid import decode_e4m3
from tracefp4.formats.schemes import NVFP4_KV
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.kv_append import kv_append
from tracefp4.ops.quantize import quantize


def new_pages(num_heads, num_frames, page_size, head_dim, exponent=0):
    size = (num_heads, num_frames, page_size)
    return BlockTensor(
        packed=torch.zeros(*size, head_dim // 2, dtype=torch.uint8),
        block_scales=torch.zeros(*size, head_dim // 16, dtype=torch.uint8),
        outer=torch.tensor(exponent, dtype=torch.int8),
        scheme=NVFP4_KV,
    )


def test_scale_of_each_block_is_read_where_it_was_written():
    # KVQ-1: head_dim 256, block b of every token holds 6 * (b + 1), so its scale is b + 1 and all codes are 7.
    blocks = torch.arange(1, 17).repeat_interleave(16) * 6.0
    rows = quantize(blocks.expand(4, 1, 256), scheme=NVFP4_KV, exponent=0)
    pages = new_pages(1, 2, 4, 256)
    kv_append(pages, rows, slots=torch.tensor([4, 5, 6, 7]))
    found = decode_e4m3(pages.block_scales[0, 1])
    assert_bitwise(found, torch.arange(1.0, 17.0).expand(4, 16).contiguous())
    assert (pages.codes()[0, 1] == 7).all()
    assert (pages.packed[0, 0] == 0).all()


def test_append_leaves_every_other_slot_alone():
    # KVQ-5: a token 1000 times larger arrives, in the same page and in the next.
    pages = new_pages(2, 3, 4, 32)
    ramp = torch.arange(1, 33) / 10
    for slot, factor in enumerate((1.0, 1000.0, 1000.0, 1000.0, 1000.0)):
        rows = quantize((ramp * factor).expand(1, 2, 32), scheme=NVFP4_KV, exponent=0)
        if slot == 0:
            first = rows
        kv_append(pages, rows, slots=torch.tensor([slot]))
    assert_bitwise(pages.packed[:, 0, 0], first.packed[0])
    assert_bitwise(pages.block_scales[:, 0, 0], first.block_scales[0])


def test_outer_scale_reaches_the_values():
    # KVQ-4: amax 10752 = 2688 * 4 needs exponent 2 and reads back exactly; with exponent 0 it saturates at 2688.
    x = torch.zeros(1, 1, 16)
    x[..., 0] = 10752.0
    for exponent, value in ((2, 10752.0), (0, 2688.0)):
        pages = new_pages(1, 1, 4, 16, exponent)
        kv_append(pages, quantize(x, scheme=NVFP4_KV, exponent=exponent), slots=torch.tensor([3]))
        assert dequantize(pages)[0, 0, 3, 0] == value


def test_float_pages_take_rows_in_their_own_dtype():
    pages = torch.zeros(2, 2, 4, 16, dtype=torch.bfloat16)
    rows = torch.randn(3, 2, 16).bfloat16().float()
    kv_append(pages, rows, slots=torch.tensor([6, 0, 3]))
    for row, (frame, offset) in enumerate(((1, 2), (0, 0), (0, 3))):
        assert_bitwise(pages[:, frame, offset], rows[row].bfloat16())


def test_no_rows_write_nothing():
    pages = new_pages(1, 1, 4, 16)
    kv_append(
        pages,
        quantize(torch.zeros(0, 1, 16), scheme=NVFP4_KV, exponent=0),
        slots=torch.zeros(0, dtype=torch.int64),
    )
    assert pages.packed.sum() == 0


@pytest.mark.parametrize("rows", ["float", "exponent", "shape"])
def test_rows_that_do_not_fit_are_refused(rows):
    x = torch.ones(1, 1, 32)
    given = {
        "float": x,
        "exponent": quantize(x, scheme=NVFP4_KV, exponent=1),
        "shape": quantize(torch.ones(2, 1, 32), scheme=NVFP4_KV, exponent=0),
    }[rows]
    with pytest.raises(FormatError, match="one kind of storage|another scheme|do not fit"):
        kv_append(new_pages(1, 1, 4, 32), given, slots=torch.tensor([0]))
